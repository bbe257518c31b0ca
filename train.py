"""
Trains one GPT, and writes ckpt.pt and log.jsonl to out/<preset>/<attn>.

On a laptop, without data and without a network (some minutes on one CPU core):
$ python train.py --attn=diff

Several kinds of attention ("arms"), one after the other, on the same tokens in the same order:
$ python train.py --attn=softmax,diff,linear,diff_linear

On one machine with eight GPUs:
$ torchrun --standalone --nproc_per_node=8 train.py --preset=gpt2 --attn=diff

Stop it whenever you like, with Ctrl-C or kill -9. The same command (without --restart) goes on from
the last checkpoint, and on a CPU it ends in the same bits as if nothing had happened. (A GPU may
add up in another order.) That works because the sequences of a step follow from the data, the seed
and the number of the step: there is no data loader whose state we would have to save.
"""
import json
import math
import os
import platform
import shlex
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

# common first: from then on Ctrl-C ends in one line
from common import UserError, above_0, add_to_log, cli, commit, count, device_name, flag, locked
from common import parse_flags, pick_device, pick_dtype, print0, processes, random_seed, write_json

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data import SHARDS, get_tokenizer, load_data
from model import ATTENTION, GPT, GPTConfig, ModelError, check_forms

PROMPT = "Once upon a time"  # what a sample at each evaluation starts with

# ---- the settings of a run


def may_change(default, help, **more):
    """A setting that may be another one when a run is resumed. All others say what the run is."""
    return flag(default, help, identity=False, **more)


@dataclass
class Config(GPTConfig):
    """All settings of a run, those of its model (GPTConfig) among them. Each is a flag."""

    attn: str = flag("softmax", f"one or a list of {', '.join(ATTENTION)}", many=True)
    preset: str | None = may_change(
        None, "gpt2 where shards and a GPU are at hand, else toy", choices=["toy", "gpt2"]
    )
    # the data is compared by its content, and not by its name
    data: Path | None = may_change(None, "folder of shards, or text file (toy: Python's manual)")
    out: Path | None = may_change(None, "folder; of several arms its parent (out/<preset>/<attn>)")
    restart: bool = may_change(False, "begin anew, and discard the run that is there")
    # the optimization
    batch_size: int = may_change(32, "sequences per micro-step, at most")
    total_batch: int = flag(524_288, "tokens per step")
    steps: int = flag(5341, "optimizer steps, over which the rate falls to 0")
    lr: float = flag(1.5e-3, "peak learning rate", type=above_0)
    warmup: int = flag(375, "steps in which the rate rises first", type=count)
    weight_decay: float = flag(0.1, "AdamW's weight decay, on matrices only")
    grad_clip: float = flag(1.0, "largest gradient norm", type=above_0)
    seed: int = flag(1337, "of weights and data order", type=random_seed)
    # watching and saving
    eval_every: int = may_change(250, "steps between evaluations; each saves a checkpoint")
    eval_tokens: int = flag(10_485_760, "val tokens")
    log_every: int = may_change(10, "steps between lines of the log")
    # the machine
    device: str | None = may_change(None, "cuda, cuda:1, cpu or mps (cuda if there is one)")
    dtype: str | None = flag(
        None, "of the matmuls (bfloat16 where the card has it)", choices=["float32", "bfloat16"]
    )
    compile: bool | None = may_change(None, "torch.compile the model (on cuda)")

    def __post_init__(self):
        super().__post_init__()
        self.device = pick_device(self.device)
        self.dtype = pick_dtype(self.device, self.dtype)
        if self.compile is None:
            self.compile = self.device.type == "cuda"

    def model_config(self):
        return GPTConfig(**{f.name: getattr(self, f.name) for f in fields(GPTConfig)})


# the settings that say what a run is
IDENTITY = [f.name for f in fields(Config) if f.metadata.get("identity", True)]

# gpt2 has the size of GPT-2 small and reads 2.8e9 tokens: it is meant for an H100. toy takes some
# minutes on a CPU core, on text that every Python has
PRESETS = {
    "gpt2": dict(data=SHARDS),
    "toy": dict(
        n_layer=4, n_head=4, n_embd=128, block_size=256, batch_size=8, total_batch=2048, steps=500,
        lr=2e-3, warmup=50, eval_every=100, eval_tokens=65_536, log_every=20,
    ),
}


def parse(argv=None, world=1):
    """A Config for each arm that a command line asks for. Raises UserError and ModelError."""
    given = parse_flags(Config, argv, __doc__, PRESETS)
    arms = given.pop("attn", ["softmax"])
    if world > 1 and given.get("device", "cuda") == "cuda" and torch.cuda.is_available():
        given["device"] = f"cuda:{os.environ['LOCAL_RANK']}"
    if "preset" not in given:
        shards = any(given.get("data", SHARDS).glob("*.bin"))
        cuda = pick_device(given.get("device")).type == "cuda"
        given["preset"] = "gpt2" if shards and cuda else "toy"

    configs = []
    for attn in arms:
        config = Config(**PRESETS[given["preset"]] | given | dict(attn=attn))
        if config.out is None:
            config.out = Path("out") / config.preset / attn
        elif len(arms) > 1:
            config.out = config.out / attn
        # each process gets the same number of whole sequences, in micro-steps of equal size. So
        # batch_size may have to be smaller than it was asked for
        if config.total_batch % (config.block_size * world) != 0:
            least = f"{config.block_size * world} (block_size x processes)"
            raise UserError(f"--total_batch={config.total_batch} is no multiple of {least}")
        sequences = config.total_batch // (config.block_size * world)
        config.batch_size = min(config.batch_size, sequences)
        while sequences % config.batch_size != 0:
            config.batch_size -= 1
        configs.append(config)
    return configs


# ---- a step


@lru_cache(maxsize=2)  # the last batch of an epoch needs the order of the next one, too
def permutation(n, seed, epoch):
    return np.random.default_rng([seed, epoch]).permutation(n)


def load_sequences(data, numbers, config):
    """These sequences of the data, (len(numbers), T + 1) int64, on the device."""
    sequences = [data.sequence(int(i), config.block_size) for i in numbers]
    tokens = torch.from_numpy(np.stack(sequences))
    if tokens.max() >= config.vocab_size:
        problem = f"token {tokens.max()}, but its tokenizer has {config.vocab_size} tokens"
        raise UserError(f"--data holds {problem}. Was another tokenizer used to prepare it?")
    if config.device.type == "cuda":
        return tokens.pin_memory().to(config.device, non_blocking=True)  # we don't wait for that
    return tokens.to(config.device)


def batch(data, config, step, micro_step, rank=0, world=1):
    """The sequences of a micro-step of this process, (batch_size, T + 1).

    The epochs lie end to end, each shuffled in its own way. They are cut into steps, a step into
    micro-steps, and a micro-step into one part for each process: with 2 processes and a batch_size
    of 4 the first one has the sequences 0 to 3, and the second one 4 to 7.
    """
    n = data.sequences(config.block_size)
    first = step * (config.total_batch // config.block_size)
    first += (micro_step * world + rank) * config.batch_size
    numbers = []
    for i in range(first, first + config.batch_size):
        order = permutation(n, config.seed, epoch=i // n)
        numbers.append(order[i % n])
    return load_sequences(data, numbers, config)


def learning_rate(step, config):
    """The rate of update `step`, the first of which is 0: linear up to lr, then down to 0."""
    warmup = min(config.warmup, config.steps - 1)  # a short run has to get to its peak, too
    if step < warmup:
        return config.lr * (step + 1) / warmup
    return config.lr * (config.steps - step) / (config.steps - warmup)


def make_optimizer(model, lr, weight_decay):
    """AdamW. Matrices decay, the embedding among them. Norms and lambda vectors do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        dict(params=matrices, weight_decay=weight_decay),
        dict(params=vectors, weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def autocast(config):
    """Matmuls in bf16, if config.dtype says so. Weights and norms stay in float32."""
    return torch.autocast(config.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16")


def training_step(model, optimizer, data, config, step, rank=0, world=1):
    """Makes update `step`, the first of which is 0.

    Returns two tensors: the loss before the update, as the mean over this process's sequences, and
    the norm of the gradient before clipping.
    """
    # for dropout in an arm of yours: it has to be the same in a run that was resumed
    torch.manual_seed((config.seed + step * world + rank) % 2**63)
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

    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    # both are still tensors. To make numbers of them we would have to wait for the GPU
    return loss_sum / micro_steps, grad_norm


# ---- evaluation


@torch.no_grad()
def evaluate(model, val, config, rank=0, world=1):
    """The mean loss in nats of the first sequences of val: the same for each arm, at each step."""
    model.eval()
    n = min(max(1, config.eval_tokens // config.block_size), val.sequences(config.block_size))
    B = config.batch_size
    total = torch.zeros((), device=config.device)
    for first in range(rank * B, n, world * B):
        tokens = load_sequences(val, range(first, min(first + B, n)), config)
        with autocast(config):
            loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        total += loss * len(tokens)  # the last batch may be smaller
    if world > 1:
        dist.all_reduce(total)  # each process has a part of the sequences
    model.train()
    return total.item() / n


def sample_text(model, config, tokenizer, max_new_tokens=40):
    """What the model makes of PROMPT if it takes the likeliest token each time."""
    model.eval()
    enc = get_tokenizer(tokenizer)
    idx = torch.tensor([enc.encode_ordinary(PROMPT)], device=config.device)
    with autocast(config):
        tokens = [token.item() for token in model.generate(idx, max_new_tokens, temperature=0)]
    model.train()
    tokens = [token for token in tokens if token != enc.eot_token]
    return PROMPT + enc.decode(tokens, errors="replace")


def lambdas_of(model):
    """lambda of each layer, or None where it is not one number a layer."""
    lambdas = [block.attn.lambda_full() for block in model.blocks]
    if lambdas[0] is None or lambdas[0].numel() > 1:
        return None
    return [x.item() for x in lambdas]


# bf16 FLOP/s without sparsity, from NVIDIA's data sheets, by what is in a card's name. Of H100s the
# one with HBM3 is the SXM card. Another card has no MFU
PEAK = {"H100 80GB HBM3": 989e12, "H100 PCIe": 756e12, "H200": 989e12, "A100": 312e12}


def flops_per_token(model):
    """Forward and backward as PaLM counts them (2204.02311, Appendix B), as if it were softmax."""
    config = model.config
    parameters = sum(p.numel() for p in model.parameters())
    return 6 * parameters + 12 * config.n_layer * config.n_embd * config.block_size


# ---- a run


def load_run(config, info):
    """The model of the run in the folder, or None if there is no run.

    info: the first line of the log, as this command would write it. UserError if the folder holds
    another run.
    """
    path = config.out / "ckpt.pt"
    log = config.out / "log.jsonl"
    if config.restart:
        return None
    if not path.exists():
        if log.exists():
            raise UserError(f"{log} is there, but its ckpt.pt is not: --restart discards the log")
        return None
    remedy = "Take another --out, or --restart discards that run"
    try:
        model = GPT.load(path, config.device, flash=config.flash, kernel=config.kernel).train()
    except ModelError as e:
        raise UserError(f"{e}. {remedy}") from None
    there = model.extra.get("run")
    if not isinstance(there, dict) or not {"step", "val_loss", "optimizer"} <= model.extra.keys():
        raise UserError(f"{path} is not of train.py. {remedy}")
    differences = []
    for name in [*IDENTITY, "data_sha256"]:
        if there.get(name) != info[name]:
            differences.append(f"{name} is {there.get(name)!r} there and {info[name]!r} here")
    if differences:
        raise UserError(f"{config.out} is another run's: {', '.join(differences)}. {remedy}")
    return model


def show(record, config):
    """Prints a record of the log."""
    parts = [f"step {record['step']:>5}/{config.steps}"]
    if "train_loss" in record:
        parts.append(f"train {record['train_loss']:.4f}")
        parts.append(f"lr {record['lr']:.2e}")
        parts.append(f"norm {record['grad_norm']:5.2f}")
        parts.append(f"{record['tok_per_s']:,.0f} tok/s")
        if record["mfu"] is not None:
            parts.append(f"MFU {record['mfu']:.1%}")
        seconds = (config.steps * config.total_batch - record["tokens"]) / record["tok_per_s"]
        parts.append(f"{timedelta(seconds=round(seconds))} left")
    if "val_loss" in record:
        parts.append(f"val {record['val_loss']:.4f}")
        if record["lambda"] is not None:
            parts.append("lambda " + " ".join(f"{x:.2f}" for x in record["lambda"]))
    print0(" | ".join(parts))
    if "sample" in record:
        print0(f"      {record['sample']!r}")


def not_finite(record):
    """What of a record is inf or NaN, like "train_loss nan", or an empty string."""
    numbers = {name: x for name, x in record.items() if isinstance(x, float)}
    return ", ".join(f"{name} {x}" for name, x in numbers.items() if not math.isfinite(x))


def train_one(config, train, val, info, rank, world, check_lock):
    """Trains one run, from its seed or from where it stopped. Returns its last val loss, or inf.

    train, val: the data. info: the first line of the log. check_lock: what locked() yields.
    """
    # the folder was looked at before, but another program may have written there since
    raw_model = load_run(config, info)
    if raw_model is None:
        raw_model = GPT(config.model_config(), config.seed).to(config.device)
    start = raw_model.extra.get("step", 0)
    parameters = sum(p.numel() for p in raw_model.parameters())
    info["parameters"] = parameters
    work = f"{config.steps} steps of {config.total_batch:,} tokens"
    print0(f"{config.attn}: {parameters / 1e6:.2f} M parameters, {work} -> {config.out}")
    if start == config.steps:
        print0(f"{config.out}: finished, {config.steps} steps (--restart starts over)")
        return raw_model.extra["val_loss"]
    optimizer = make_optimizer(raw_model, config.lr, config.weight_decay)
    if start > 0:
        print0(f"goes on after step {start}")
        optimizer.load_state_dict(raw_model.extra.pop("optimizer"))
    compiled = raw_model
    if config.compile:
        torch.compiler.reset()  # forget the compiled code of the arm before
        compiled = torch.compile(raw_model)
    model = DistributedDataParallel(compiled) if world > 1 else compiled
    peak = [flops for card, flops in PEAK.items() if card in info["device_name"]]
    full_speed = None  # in tokens per second
    if peak and config.dtype == "bfloat16":
        full_speed = peak[0] * world / flops_per_token(raw_model)

    # when a pass of this loop begins, `step` updates are done. It may log and evaluate that state,
    # and then it makes the next update. loss and grad_norm are those of the last one
    loss = grad_norm = None
    last_logged = start
    clock = time.perf_counter()
    for step in range(start, config.steps + 1):
        evaluate_now = step % config.eval_every == 0 or step == config.steps
        # to look at the loss we have to wait for the GPU, so we don't do it every time. The step of
        # the checkpoint from which we go on is in the log already. Of step 0 that is not sure: a
        # kill may have come between its checkpoint and the log
        is_new = step > start or step == 0
        if is_new and (evaluate_now or step % config.log_every == 0):
            record = dict(step=step, tokens=step * config.total_batch)
            if step > 0:
                if world > 1:
                    dist.all_reduce(loss)
                record["train_loss"] = loss.item() / world  # of this one step
                record["lr"] = learning_rate(step - 1, config)
                record["grad_norm"] = grad_norm.item()
                seconds = time.perf_counter() - clock
                record["tok_per_s"] = (step - last_logged) * config.total_batch / seconds
                record["mfu"] = record["tok_per_s"] / full_speed if full_speed else None
            if evaluate_now:
                record["val_loss"] = evaluate(compiled, val, config, rank, world)
                record["lambda"] = lambdas_of(raw_model)
                if step > 0:
                    record["sample"] = sample_text(raw_model, config, info["tokenizer"])
            bad = not_finite(record)
            if bad:  # such a model does not recover, and must not replace the checkpoint
                record = dict(step=step, tokens=record["tokens"], diverged=bad)
            if rank == 0:
                save(record, config, raw_model, optimizer, info, check_lock)
            if bad:
                rest = "The last checkpoint is kept. Try a lower --lr, with another --out"
                print0(f"{config.out} diverged at step {step}: {bad}. {rest}", file=sys.stderr)
                return math.inf
            show(record, config)
            last_logged = step
            clock = time.perf_counter()
        if step < config.steps:
            loss, grad_norm = training_step(model, optimizer, train, config, step, rank, world)
    return record["val_loss"]


def save(record, config, model, optimizer, info, check_lock):
    """Writes a record to the log, and then, with an evaluation, the checkpoint.

    At step 0 the checkpoint comes first: the log of an old run goes only when there is a new one.
    """
    check_lock()
    log = config.out / "log.jsonl"
    step = record["step"]
    if step > 0:
        if not log.exists():
            write_json(log, info)
        add_to_log(log, record)
    if "val_loss" not in record:
        return
    # nobody resumes a finished run, and the optimizer is twice as large as the model
    state = optimizer.state_dict() if step < config.steps else None
    more = dict(step=step, val_loss=record["val_loss"], tokenizer=info["tokenizer"], run=info)
    model.save(config.out / "ckpt.pt", optimizer=state, **more)
    if step == 0:
        write_json(log, info, record)


def main(argv=None):
    """Trains the runs that a command line asks for. Returns the last val loss of each."""
    rank, world = processes()
    configs = parse(argv, world)
    config = configs[0]  # the arms differ in nothing else
    if config.device.type == "cuda":
        torch.cuda.set_device(config.device)  # make it what "cuda" means from here on
    if world > 1:
        dist.init_process_group()
    torch.set_float32_matmul_precision("high")  # TF32, where matmuls are in float32

    train, val, tokenizer, about = load_data(config.data)
    print0(f"preset {config.preset} on {device_name(config.device)}, {config.dtype}")
    splits = f"{train.tokens:,} tokens to train on, {val.tokens:,} val ({about['val']})"
    print0(f"data {about['data']}: {splits}")
    if train.tokens <= config.total_batch or val.tokens <= config.block_size:
        least = f"more than {config.total_batch:,} to train on and {config.block_size:,} val"
        raise UserError(f"{about['data']} is too short: a run needs {least}")

    about |= dict(tokenizer=tokenizer, date=time.strftime("%Y-%m-%d"), commit=commit())
    about |= dict(device_name=device_name(config.device), torch=torch.__version__)
    about |= dict(python=platform.python_version())
    infos = []  # the first lines of the logs: all that is known of a run before it begins
    for config in configs:
        config.vocab_size = get_tokenizer(tokenizer).n_vocab
        check_forms(config.model_config())
        # paths and devices turn into their names
        infos.append(json.loads(json.dumps(asdict(config) | about, default=str)))
        load_run(config, infos[-1])  # refuse a folder now, and not after hours of another arm
    losses = []
    for config, info in zip(configs, infos):
        with locked(config.out) if rank == 0 else nullcontext() as check_lock:
            losses.append(train_one(config, train, val, info, rank, world, check_lock))
    if world > 1:
        dist.destroy_process_group()

    folders = [shlex.quote(str(config.out)) for config in configs]
    print0(f"\ncompare runs:    python bench.py loss {' '.join(folders)}")
    if ATTENTION[config.attn].__module__ == "model":  # sample.py knows no arm of another file
        print0(f"sample from it:  python sample.py --ckpt={folders[-1]}")
    return losses


def run():
    """The program. It fails if a run diverged, and has said why."""
    try:
        if math.inf in main():
            sys.exit(1)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("without --restart the same command goes on") from None


if __name__ == "__main__":
    cli(run)
