"""
Times the arms in turn, in rounds, so that a slow minute slows them all.

$ python bench.py speed     # a training step, and an attention layer alone, forward and backward
$ python bench.py decode    # 16 tokens of the sampler at the end of a context, and its state's size

After each time comes its ratio to the first arm's: the median over the rounds (least to largest).
"""
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Literal

import numpy as np
import torch
import tyro
from torch.utils.benchmark import Timer

import train
from data import one_sentence
from model import ATTENTION, GPT, next_token

ON_CUDA = torch.cuda.is_available()


@dataclass
class Config:
    verb: tyro.conf.Positional[Literal["speed", "decode"]]
    attn: str = ",".join(ATTENTION)  # arms; the others are compared to the first
    T: str = "256,1024,4096"  # lengths in tokens (above 16 for decode)
    rounds: int = 7  # times that each arm has its turn
    preset: Literal["toy", "gpt2"] = "gpt2" if ON_CUDA else "toy"  # the size of the model

    def __post_init__(self):
        unknown = set(self.attn.split(",")) - ATTENTION.keys()
        if unknown:
            raise ValueError(f"attn is {unknown.pop()!r}, not one of {', '.join(ATTENTION)}")
        least = 17 if self.verb == "decode" else 1
        if not all(T.isdigit() and int(T) >= least for T in self.T.split(",")):
            raise ValueError(f"T must be numbers from {least} on, like 256,1024, not {self.T}")
        if self.rounds < 1:
            raise ValueError(f"rounds must be 1 or more, not {self.rounds}")


def attention_layer(config):
    layer = ATTENTION[config.attn](config, 0).to(config.device)
    compiled = torch.compile(layer, dynamic=False, disable=not ON_CUDA)
    size = (config.batch_size, config.block_size, config.n_embd)
    x = torch.randn(size, device=config.device, requires_grad=True)

    def call():
        with train.autocast(config):
            y = compiled(x)
        inputs = [x, *layer.parameters()]
        torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)

    return call


def training_step(config):
    model = GPT(config).to(config.device)
    optimizer = train.make_optimizer(model, config)
    data = np.random.default_rng(0).integers(config.vocab_size, size=4 * config.total_batch + 1)
    compiled = torch.compile(model, dynamic=False, disable=not ON_CUDA)
    return lambda: train.training_step(compiled, optimizer, data, config, step=0)


def sampled_tokens(config):
    model = GPT(config).to(config.device).eval()
    idx = torch.zeros(1, config.block_size - 16, dtype=torch.int64, device=config.device)
    state = {}
    with torch.no_grad(), train.autocast(config):
        model(idx, state=state)
    size = sum(x.nbytes for layer in state["layers"] for x in layer.values())
    print(f"{config.attn:16} {size:10,} bytes of state")

    def call():
        # a step puts new tensors into the state, so a copy of the dicts leaves it as it is
        copy = dict(length=state["length"], layers=[dict(layer) for layer in state["layers"]])
        with torch.inference_mode(), train.autocast(config):
            for _ in range(16):
                next_token(model(idx[:, :1], state=copy)[0][:, -1], temperature=0)

    return call


def time_arms(make_call, configs, rounds):
    torch.compiler.reset()  # frees what other lengths have compiled
    timers = [Timer("f()", globals={"f": make_call(config)}) for config in configs]
    times = []  # in seconds, a row for each round
    for _ in range(1 + rounds):  # the first one compiles
        times.append([timer.blocked_autorange(min_run_time=0.03).median for timer in timers])
    times = np.array(times[1:])
    for config, time, ratio in zip(configs, times.T, (times / times[:, :1]).T):
        spread = f"{median(ratio):.2f} ({min(ratio):.2f} to {max(ratio):.2f})"
        print(f"{config.attn:16} {median(time) * 1e3:10.3f} ms, {spread}", flush=True)


def main(argv=None):
    bench = tyro.cli(Config, description=__doc__, args=argv, use_underscores=True)
    torch.set_float32_matmul_precision("high")  # as in train.py
    calls = [attention_layer, training_step] if bench.verb == "speed" else [sampled_tokens]
    preset = train.PRESETS[bench.preset]
    with one_sentence("bench.py"):
        for make_call, T in product(calls, map(int, bench.T.split(","))):
            B = max(1, preset.batch_size * preset.block_size // T)
            size = dict(block_size=T, batch_size=B, total_batch=B * T)
            size["vocab_size"] = {"toy": 257, "gpt2": 50257}[bench.preset]
            print(f"\n{make_call.__name__}, T = {T:,}, {preset.dtype}")
            configs = [replace(preset, attn=attn, **size) for attn in bench.attn.split(",")]
            time_arms(make_call, configs, bench.rounds)


if __name__ == "__main__":
    main()
