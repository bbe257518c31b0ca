"""
Trains GPTs, and writes ckpt.pt and log.jsonl to out/<preset>/<attn>.

$ python train.py --attn=diff                   # on a laptop, without data: some minutes on a core
$ python train.py --attn=softmax,diff,linear    # one after the other, on the same tokens
$ torchrun --standalone --nproc_per_node=8 train.py --preset=gpt2 --attn=diff

Without --preset it is toy, or gpt2 if there is a GPU and prepare_fineweb.py has run. To read this
file, begin with training_step. The loop is train(), and the last part keeps its folder.

Stop it with Ctrl-C or kill -9: the same command, without --restart, goes on from the last
checkpoint, and on a CPU, with as many threads, it ends in the same bits. The tokens of a step
follow from the data, the seed and the number of the step: there is no data loader with a state.
"""
import argparse
import hashlib
import json
import math
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.nn.parallel import DistributedDataParallel

from check_arm import check_arm, is_own, lambda_of
from data import FINEWEB, get_tokenizer, load_data, load_sequences, one_sentence
from model import GPT, Block, GPTConfig, ModelError

RANK = int(os.environ.get("RANK") or 0)  # torchrun starts WORLD processes and numbers them
WORLD = int(os.environ.get("WORLD_SIZE") or 1)
# cards before the A100, like Colab's T4, have no fast kernels for bf16
HAS_BF16 = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8

# ---- the settings

@dataclass
class Config(GPTConfig):
    """The settings of a run, those of its model among them."""

    # softmax, softmax_average, diff, diff_v2, linear, linear_average, diff_linear, or a list of
    # them, like softmax,diff
    attn: str = "softmax"
    vocab_size: tyro.conf.Suppress[int] = 50257  # the tokenizer's
    preset: Literal["toy", "gpt2"] = "gpt2"  # toy is for a laptop, gpt2 is GPT-2 small on an H100
    data: str | None = None  # folder of prepare_fineweb.py, or text file (toy: Python's manual)
    out: str | None = None  # folder, to which the arm's name is added (out/<preset>)
    restart: bool = False  # begin anew. The old run is kept until the first new checkpoint
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
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cuda, cuda:1, cpu or mps
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if HAS_BF16 else "float32"  # of matmuls
    compile: bool = True  # torch.compile the model (on cuda)

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) in (int, float):
                may_be_0 = field.name in MAY_BE_0
                highest = 2**63 if type(value) is int else math.inf
                if not (0 < value < highest or value == 0 and may_be_0):  # nan is neither
                    least = "0 or more" if may_be_0 else "above 0"
                    raise ValueError(f"{field.name} must be {least} and not too large: {value}")
        kind, _, number = self.device.partition(":")
        known = kind in ("cpu", "cuda", "mps") and getattr(torch, kind).is_available()
        if not known or int(number or 0) >= getattr(torch, kind).device_count():
            raise ValueError(f"PyTorch sees no {self.device} here")
        if self.kernel == "flash_attn" and (kind != "cuda" or self.dtype != "bfloat16"):
            raise ValueError("--kernel=flash_attn needs --device=cuda and --dtype=bfloat16")


MAY_BE_0 = ("warmup", "weight_decay", "grad_clip", "seed", "rope_theta", "subln")
PRESETS = {
    "gpt2": Config(data=str(FINEWEB)),
    "toy": Config(preset="toy", n_layer=4, n_head=4, n_embd=128, block_size=256, batch_size=8,
                  total_batch=2048, steps=500, lr=2e-3, warmup=50, eval_every=100,
                  eval_tokens=65_536, log_every=20),
}


def parse(argv=None):
    """A Config for each arm that a command line asks for. ValueError for impossible settings."""
    # the preset first, since it has the defaults of all other flags
    p = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    is_gpt2 = FINEWEB.exists() and torch.cuda.is_available()
    p.add_argument("--preset", default="gpt2" if is_gpt2 else "toy")
    preset = PRESETS.get(p.parse_known_args(argv)[0].preset, PRESETS["toy"])
    config = tyro.cli(Config, description=__doc__, default=preset, args=argv, use_underscores=True)
    if config.kernel == "flash_attn":
        import flash_attn  # noqa: F401  if it is missing, say so now
    if not 0 <= RANK < WORLD or (WORLD > 1 and "MASTER_ADDR" not in os.environ):
        raise ValueError(f"RANK is {RANK} and WORLD_SIZE is {WORLD}: start it with torchrun, "
                         "or unset both")
    sequences = config.total_batch // (config.block_size * WORLD)  # of a process in a step
    config.batch_size = max(1, min(config.batch_size, sequences))
    multiple = config.block_size * config.batch_size * WORLD
    if sequences == 0 or config.total_batch % multiple != 0:
        raise ValueError(f"total_batch must be a multiple of {multiple}, not {config.total_batch}")
    out = Path(config.out or f"out/{config.preset}").expanduser()
    arms = [attn.strip() for attn in config.attn.split(",")]
    return [replace(config, attn=attn, out=str(out / attn)) for attn in arms]


# ---- a step

@lru_cache(maxsize=2)  # a batch may go over from one epoch into the next one
def permutation(n, seed, epoch):
    return np.random.default_rng([seed, epoch]).permutation(n)


def batch(data, config, step, micro_step, rank=RANK, world=WORLD):
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


BETAS = (0.9, 0.95)  # AdamW's
EPS = 1e-8  # AdamW's


def decays(p):
    """Whether a parameter decays: all matrices do, with the embedding and diff_v2's lambda_proj.

    Norms don't, nor lambdas that are vectors or numbers.
    """
    return p.ndim == 2 or p.squeeze().ndim > 1  # a vector may have another shape, like (h, 1, 1)


def make_optimizer(model, config):
    """AdamW with weight decay for matrices only."""
    matrices = [p for p in model.parameters() if decays(p)]
    vectors = [p for p in model.parameters() if not decays(p)]
    decaying = dict(params=matrices, weight_decay=config.weight_decay)
    others = dict(params=vectors, weight_decay=0.0)
    return torch.optim.AdamW([decaying, others], lr=config.lr, betas=BETAS, eps=EPS, fused=True)


def autocast(config):
    """Matmuls in bf16, if config.dtype says so. Weights and norms stay in float32."""
    device_type = torch.device(config.device).type
    return torch.autocast(device_type, torch.bfloat16, enabled=config.dtype == "bfloat16")


def training_step(model, optimizer, data, config, step):
    """Makes update `step`, the first of which is 0.

    Returns the loss before the update, the mean over this process's sequences, and the norm of the
    gradient before clipping. Both are tensors: as numbers they would have to wait for the GPU.
    """
    torch.manual_seed(config.seed + step * WORLD + RANK)  # for an arm of yours that has dropout
    for param_group in optimizer.param_groups:
        param_group["lr"] = learning_rate(step, config)
    micro_steps = config.total_batch // (config.batch_size * config.block_size * WORLD)
    loss_sum = torch.zeros((), device=config.device)
    for micro_step in range(micro_steps):
        if WORLD > 1:
            # the processes have to average their gradients only once, in the last micro-step.
            # DistributedDataParallel.no_sync() sets the same flag
            model.require_backward_grad_sync = micro_step == micro_steps - 1
        tokens = batch(data, config, step, micro_step)
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
def evaluate(model, val, config):
    """The mean loss in nats of the first sequences of val: the same for each arm, at each step."""
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
        dist.all_reduce(total)  # each process has a part of the sequences
    model.train()
    return total.item() / n


@torch.no_grad()
def lambdas(model, idx):
    """The mean lambda of each layer that has one, over the tokens of idx (B, T)."""
    inputs = []
    hooks = [block.attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
             for block in model.blocks]
    model(idx)
    for hook in hooks:
        hook.remove()
    found = [lambda_of(block.attn, x) for block, x in zip(model.blocks, inputs)]
    return [round(lam, 4) for lam in found if lam is not None]


def look_at(model, val, enc, config):
    """lambda on one batch of val, and a sample: the likeliest token each time."""
    n = min(config.batch_size, (len(val) - 1) // config.block_size)
    idx = load_sequences(val, range(n), config.block_size)[:, :-1].to(config.device)
    model.eval()
    with autocast(config):
        found = {"lambda": lambdas(model, idx)}
        try:
            prompt = enc.encode_ordinary("Once upon a time")
        except ValueError:  # a tokenizer of letters may lack one of them
            prompt = idx[0, :1].tolist()
        start = torch.tensor([prompt], device=config.device)
        new = [token.item() for token in model.generate(start, 40, temperature=0)]
    model.train()
    return found | dict(sample=enc.decode(prompt + new, errors="backslashreplace"))


def speed(config, size, steps, step, seconds):
    """Tokens a second in the last `steps` steps, and what follows from them."""
    rate = steps * config.total_batch / seconds
    found = dict(tok_per_s=round(rate))
    found["minutes_left"] = (config.steps - step) * config.total_batch / rate / 60
    if config.device.startswith("cuda") and torch.cuda.get_device_capability()[0] == 9:
        # forward and backward as PaLM counts them (2204.02311, B), as if each arm were softmax
        flops = 6 * size + 12 * config.n_layer * config.n_embd * config.block_size
        found["mfu"] = rate * flops / (WORLD * 989e12)  # of the peak of an H100 or H200 in bf16
    return found


# ---- the loop

def train(config, run, data, val, tokenizer):
    """Trains one model, from its checkpoint if there is one. Returns the lines of its log.

    run: the dict of describe(), which becomes the first line of a new run's log.
    """
    torch.manual_seed(config.seed)  # for an arm of yours that draws its first weights itself
    model = GPT(config, config.seed).to(config.device)
    optimizer = make_optimizer(model, config)
    size = sum(p.numel() for p in model.parameters())
    step, log = resume(run | dict(parameters=size), model, optimizer)
    compiled = model
    if config.compile and config.device.startswith("cuda"):
        torch.compiler.reset()  # or the later arms of a list would not be compiled any more
        # dynamic=False, or a smaller last batch of an evaluation would make all sizes unknown
        compiled = torch.compile(model, dynamic=False)
    # one set of weights under three names: compiled is faster, and trained also averages gradients.
    # To sample, the model itself is called, since compiled would be compiled anew for each length
    trained = compiled
    if WORLD > 1:
        # an arm of yours may have parameters that it does not use
        unused = is_own(config.attn)
        trained = DistributedDataParallel(compiled, find_unused_parameters=unused)

    last = step  # the step of the last line of the log
    clock = time.perf_counter()
    # each process decides alike here, since all of them know the same numbers
    while step < config.steps and "diverged" not in log[-1]:
        loss, grad_norm = training_step(trained, optimizer, data, config, step)
        step += 1
        evaluate_now = step % config.eval_every == 0 or step == config.steps
        if not evaluate_now and step % config.log_every != 0:
            continue  # to look at the loss we have to wait for the GPU
        if WORLD > 1:
            dist.all_reduce(loss)
        record = dict(step=step, tokens=step * config.total_batch)
        record |= dict(train_loss=loss.item() / WORLD, grad_norm=grad_norm.item())
        record["lr"] = learning_rate(step - 1, config)
        record |= speed(config, size, step - last, step, seconds=time.perf_counter() - clock)
        if evaluate_now:
            record["val_loss"] = evaluate(compiled, val, config)
            record |= look_at(model, val, get_tokenizer(tokenizer), config)
        numbers = [record["train_loss"], record["grad_norm"], record.get("val_loss", 0)]
        if not all(map(math.isfinite, numbers)):
            # such a model does not recover, and must not replace the checkpoint
            record = dict(step=step, diverged="it is not saved. Try a lower --lr")
        log.append(record)
        if RANK == 0:
            report(run["out"], log, model, optimizer, tokenizer)
        last = step
        clock = time.perf_counter()
    return log


def main(argv=None):
    """Trains the runs that a command line asks for. Returns the last val loss of each."""
    torch.set_float32_matmul_precision("high")  # TF32, where matmuls are in float32
    configs, runs, *data = open_runs(argv)
    if WORLD > 1:
        if configs[0].device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    if configs[0].preset == "toy" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # at this size more threads mostly wait for one another
    logs = []
    with one_sentence("train.py"):
        if RANK == 0:
            print(f"preset {configs[0].preset} on {configs[0].device}, {len(data[0]):,} tokens")
            if configs[0].device.startswith("mps"):
                print("nobody has run this on mps yet: compare the first steps with --device=cpu")
        for config, run in zip(configs, runs):
            try:
                logs.append(train(config, run, *data))
            except KeyboardInterrupt:
                sys.exit(f"\nstopped: {where_it_goes_on(run)}")
        losses = [log[-1].get("val_loss", math.inf) for log in logs]
        if RANK == 0:
            summarize(logs)
    if WORLD > 1:
        dist.destroy_process_group()
    return losses


# ---- the folder of a run: it goes on from ckpt.pt alone. The log is in it, and log.jsonl is a copy

# what may change when a run goes on: these settings don't say what the run is. (A preset is only
# defaults, and of the data the hash is compared)
MAY_CHANGE = ("preset", "data", "out", "restart", "kernel", "batch_size", "eval_every",
              "log_every", "device", "compile", "code", "torch", "date")

# those of them that the log notes if they do
NOTED_IF_CHANGED = ("kernel", "batch_size", "device", "compile", "code", "torch")


class RunError(ValueError):
    """The folder holds another run, or a log whose checkpoint is gone."""


def open_runs(argv):
    """(configs, what describe() says of each, train, val, tokenizer) of a command line.

    All that can be refused is refused here, before the first arm is trained.
    """
    with one_sentence("train.py", ValueError, ImportError):
        configs = parse(argv)
        data, val, tokenizer = load_data(configs[0].data)
        longest = min(len(data), len(val)) - 1
        if longest < configs[0].block_size:
            raise ValueError(f"--data={configs[0].data} is too short for a block of "
                             f"{configs[0].block_size} tokens")
    n_vocab = get_tokenizer(tokenizer).n_vocab
    configs = [replace(config, vocab_size=n_vocab) for config in configs]
    # not every ValueError: one in the code of your own arm keeps its traceback
    with one_sentence("train.py", ModelError, RunError):
        runs, remarks = [describe(config, data, val) for config in configs], []
        for config, run in zip(configs, runs):
            load_run(run)  # for its RunError alone. train() loads it when its turn comes
            remarks += check_arm(config)
        for run in runs:
            Path(run["out"]).mkdir(parents=True, exist_ok=True)
    if RANK == 0 and remarks:
        print(*remarks, sep="\n")
    return configs, runs, data, val, tokenizer


def describe(config, data, val):
    """What a run is: its settings, as they run, a hash of its data, and one of its code."""
    block = Block(config, depth=0)  # to find the values behind settings that are None
    run = asdict(config) | dict(mlp_width=block.mlp.up_proj.out_features)
    if config.subln is None:
        run["subln"] = getattr(block.attn, "usual_subln", 0.0)
    run |= dict(train_tokens=len(data), val_tokens=len(val))
    run["data_hash"] = hash_of(data, val)
    code = hashlib.sha256()
    for module in ("model", __name__, type(block.attn).__module__):
        file = getattr(sys.modules.get(module), "__file__", None)  # a notebook has none
        code.update(Path(file).read_bytes() if file else b"")
    run |= dict(code=code.hexdigest()[:12], torch=str(torch.__version__))
    return run | dict(date=time.strftime("%Y-%m-%d"))


def hash_of(*arrays):
    """A hash of all tokens of these arrays, or of 1,000 pieces of 1,000 if there are more."""
    found = hashlib.sha256()
    for tokens in arrays:
        for first in range(0, len(tokens), max(1000, len(tokens) // 1000)):
            found.update(tokens[first : first + 1000].tobytes())
    return found.hexdigest()[:12]


def load_run(run):
    """The model that was saved for this run, or None. RunError if another run was."""
    path, log = Path(run["out"], "ckpt.pt"), Path(run["out"], "log.jsonl")
    if run["restart"]:
        return None
    if not path.exists():
        if log.exists() and "val_loss" in log.read_text():  # so there was a checkpoint
            raise RunError(f"{path} is gone, but not its log: --restart discards that run")
        return None
    saved = GPT.load(path)
    first = saved.extra["log"][0] if "log" in saved.extra else {}
    for name, value in run.items():
        old = first.get(name)
        if name not in MAY_CHANGE and old != value:
            if name in ("train_tokens", "val_tokens", "data_hash"):
                name = f"--data's {name}"
            raise RunError(f"{run['out']} is another run: {name} is {old!r} there and {value!r} "
                           "here. Take another --out, or --restart")
    return saved


def resume(run, model, optimizer):
    """(step, log) from the checkpoint, loaded into model and optimizer, or those of a new run."""
    step, log = 0, [run]
    saved = load_run(run)
    if saved is not None:
        model.load_state_dict(saved.state_dict())
        optimizer.load_state_dict(saved.extra["optimizer"])
        step, log = saved.extra["step"], saved.extra["log"]
    if RANK == 0:
        print(f"{run['attn']}: {run['parameters']:,} parameters, from step {step} -> {run['out']}")
        note_changes(run, step, log[0])
        write_log(run["out"], log)  # which now ends where the checkpoint does
    return step, log


def note_changes(run, step, first):
    """Notes in a log's first line what is not as it was when the run last went on."""
    before = dict(first)
    for note in first.get("went_on_with", []):
        before |= note
    changed = {name: run[name] for name in NOTED_IF_CHANGED if before.get(name) != run[name]}
    is_over = step == run["steps"]
    if changed and not is_over:
        first.setdefault("went_on_with", []).append(dict(step=step) | changed)
    if "code" in changed:
        what = "is finished: --restart trains it anew" if is_over else "goes on"
        print(f"{run['out']} was last trained by other code than this, and {what}")


def where_it_goes_on(run):
    """A sentence for whoever has stopped a run."""
    path = Path(run["out"], "ckpt.pt")
    step = GPT.load(path).extra["step"] if path.exists() else 0
    again = "without --restart the run there" if run["restart"] else "the same command"
    return f"{again} goes on from step {step}"


def write_log(out, log):
    """Writes all lines of a log, which are few."""
    Path(out, "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))


def report(out, log, model, optimizer, tokenizer):
    """Saves the model if it was just evaluated, writes the log, and prints its last line."""
    record = log[-1]
    if "val_loss" in record:
        extra = dict(step=record["step"], log=log, optimizer=optimizer.state_dict())
        model.save(Path(out, "ckpt.pt"), tokenizer=tokenizer, **extra)
    write_log(out, log)
    shown = {name: f"{x:.5g}" if type(x) is float else x for name, x in record.items()}
    print(" | ".join(f"{name} {x}" for name, x in shown.items()), flush=True)


def summarize(logs):
    """Prints a line for each run, and what one can do next with the last one."""
    for run, *_, last in logs:
        print(f"{run['attn']:16} val loss {last.get('val_loss', math.inf):.4f}, "
              f"{last.get('tok_per_s', 0):,} tokens/s, {run['parameters']:,} parameters")
    run = logs[-1][0]
    out = Path(run["out"])
    if Path(out, "ckpt.pt").exists():  # a run may have diverged before its first
        print(f"sample from it:  python {sampler(run['attn'])} --ckpt={shlex.quote(str(out))}")
    # the runs of a seed lie in out/seeds/<seed>/<attn>, those of a single one in out/toy/<attn>
    several = out.parent.parent if out.parent.name.isdecimal() else out.parent
    print(f"compare seeds:   python -m lab.losses {shlex.quote(str(several))}")


def sampler(attn):
    """The program that can sample from an arm: an arm of your own is known to its file alone."""
    if not is_own(attn):
        return "sample.py"
    spec = sys.modules["__main__"].__spec__  # None, unless it was started with python -m
    return f"-m {spec.name}" if spec else shlex.quote(sys.argv[0])


if __name__ == "__main__":
    sys.exit(1 if math.inf in main() else 0)  # 1 if a run diverged
