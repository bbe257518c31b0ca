"""
Compiles a model as train.py does, times its training step, and compares it with the eager model.

$ python -m lab.gpt2.step FOLDER N --preset=gpt2 --attn=diff      # and other flags of train.py

N of these run at the same time, since compiling takes most of a minute of a CPU. Then each has the
GPU in its turn. What is compiled stays in PyTorch's cache on the disk, so a training that follows
begins at once. Each process adds a line to FOLDER/steps.jsonl.
"""
import fcntl
import json
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch._functorch.config

import train
from lab.gpt2.two_texts import token_losses
from model import GPT

LONGEST = 60  # seconds. Who has not compiled by then is not waited for


@contextmanager
def turn(folder):
    """Alone on the GPU."""
    with open(folder / "turn", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()  # all of them together would not fit


def main():
    start = time.perf_counter()
    folder, n = Path(sys.argv[1]), int(sys.argv[2])
    config = train.parse(sys.argv[3:])[0]
    # with a rate of 0 all steps have the same weights, and here the same tokens, too
    config = replace(config, lr=0.0, eval_tokens=2 * config.batch_size * config.block_size)
    torch.set_float32_matmul_precision("high")  # as in train.py
    # else the backward pass would be compiled while the forward pass holds its memory
    torch._functorch.config.force_non_lazy_backward_lowering = True
    model = GPT(config, config.seed).to(config.device)
    compiled = torch.compile(model, dynamic=False, disable=config.device == "cpu")
    optimizer = train.make_optimizer(model, config)
    data = np.random.default_rng(0).integers(config.vocab_size, size=config.total_batch + 1)

    def step(model, config=config):
        loss, grad_norm = train.training_step(model, optimizer, data, config, step=0)
        return loss.item(), grad_norm.item()

    while True:
        try:
            step(compiled)
            token_losses(compiled.eval(), data, config)
            break
        except torch.OutOfMemoryError:  # another one has the memory: no turns are taken yet
            torch.cuda.empty_cache()
            time.sleep(2)
    torch.cuda.empty_cache()
    compiled.train()
    found = dict(attn=config.attn, mlp_width=config.mlp_width, ms=[])
    found["compile_s"] = round(time.perf_counter() - start)
    (folder / f"ready-{config.attn}-{config.mlp_width}").touch()
    while len(list(folder.glob("ready-*"))) < n and time.perf_counter() - start < LONGEST:
        time.sleep(0.2)

    for _ in range(2):
        with turn(folder):
            step(compiled)  # gets its memory back
            clock = time.perf_counter()
            for _ in range(2):
                found["loss_norm_compiled"] = step(compiled)
            found["ms"].append(round((time.perf_counter() - clock) / 2 * 1e3, 1))
            found["GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    found["tok_per_s"] = round(config.total_batch / min(found["ms"]) * 1e3)
    with turn(folder):  # the eager model needs more memory, so its micro-steps are smaller
        smaller = replace(config, batch_size=max(1, config.batch_size // 4))
        found["loss_norm_eager"] = step(model, smaller)
    line = json.dumps(found)
    with open(folder / "steps.jsonl", "a") as file:
        file.write(line + "\n")
    print(line, flush=True)


if __name__ == "__main__":
    main()
