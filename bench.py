"""
Times a training step of each kind of attention, in turn and in rounds, so that a slow minute slows
them all. After each time comes its ratio to the first one's: the median (least to largest).

$ python bench.py                                   # all kinds, at the toy's size
$ python bench.py --preset=gpt2 --attn=softmax,diff,diff_linear --block_size=4096 --batch_size=8
"""
import sys
import time
from statistics import median

import numpy as np
import torch

import train
from cli import one_sentence
from model import ATTENTION, GPT

ROUNDS, STEPS = 7, 3


def make_call(config):
    """A function that makes some steps, and returns the seconds of one."""
    model = GPT(config).to(config.device)
    optimizer = train.make_optimizer(model, config)
    data = np.random.default_rng(0).integers(config.vocab_size, size=4 * config.total_batch + 1)
    is_compiled = config.compile and config.device.startswith("cuda")
    compiled = torch.compile(model, dynamic=False, disable=not is_compiled)

    def seconds():
        start = time.perf_counter()
        for step in range(STEPS):
            loss, _ = train.training_step(compiled, optimizer, data, config, step)
        loss.item()  # waits for the GPU
        return (time.perf_counter() - start) / STEPS

    return seconds


def main(argv=None):
    torch.set_float32_matmul_precision("high")  # as in train.py
    argv = sys.argv[1:] if argv is None else argv
    with one_sentence():
        configs = train.parse([f"--attn={','.join(ATTENTION)}", *argv])  # the last --attn counts
        calls = [make_call(config) for config in configs]
    times = np.array([[seconds() for seconds in calls] for _ in range(1 + ROUNDS)])
    times = times[1:]  # the first round compiles
    for config, time_, ratio in zip(configs, times.T, (times / times[:, :1]).T):
        print(f"{config.attn:16} {median(time_) * 1e3:10.3f} ms, {median(ratio):.2f} "
              f"({min(ratio):.2f} to {max(ratio):.2f})")


if __name__ == "__main__":
    main()
