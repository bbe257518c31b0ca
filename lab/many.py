"""
Trains many small models at once, as one model whose parameters have a further dimension.

A run of the toy takes three minutes on a core, and needs a small part of a GPU. Here the models of
a group have the same shapes, and differ in their first weights, their order of the data and their
rate. Each of them is trained as train.py does it, on the same tokens with the same AdamW, but for
rounding, and on a GPU in float32 with TF32, where train.py mostly takes bfloat16.
"""
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch.func import functional_call, vmap

from train import learning_rate, make_optimizer, permutation

ALIGN = 32  # each parameter begins at a multiple of so many numbers, as fast kernels want it


def flat(model):
    """All parameters of a model in one vector, (P,)."""
    parts = [p.detach().flatten() for p in model.parameters()]
    return torch.cat([F.pad(part, (0, -len(part) % ALIGN)) for part in parts])


def sequence_numbers(seed, config, n):
    """The numbers of the sequences that a run reads, (steps, B), as train.batch chooses them."""
    B = config.total_batch // config.block_size
    places = range(config.steps * B)
    return np.array([permutation(n, seed, i // n)[i % n] for i in places]).reshape(-1, B)


def sequences(data, numbers, T):
    """The sequences of data with these numbers (..., B): (..., B, T + 1) int64."""
    places = numbers[..., None] * T + torch.arange(T + 1, device=data.device)
    return data[places].long()


class Together:
    """Trains groups of N models, which all have the shapes of `model`."""

    def __init__(self, model, device="cpu"):
        self.model = model.to(device)  # whose own parameters are not used
        self.device = device
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        self.sizes = [p.numel() + -p.numel() % ALIGN for p in model.parameters()]
        self.losses = vmap(self.loss)
        self.losses_on_val = vmap(self.loss, in_dims=(0, None))
        self.update = adamw
        if device != "cpu":
            self.losses = torch.compile(self.losses, dynamic=False)
            self.update = torch.compile(adamw, dynamic=False)
        torch.set_float32_matmul_precision("high")  # as in train.py

    def loss(self, params, tokens):
        """The loss of one model, with the parameters (P,), on its tokens (B, T + 1)."""
        parts = zip(self.shapes.items(), params.split(self.sizes))
        weights = {name: part[: shape.numel()].view(shape) for (name, shape), part in parts}
        return functional_call(self.model, weights, (tokens[:, :-1], tokens[:, 1:]))[1]

    def train(self, models, rates, seeds, config, data, val):
        """Trains the models, each with a rate and a seed of its own. Returns (val losses, params).

        config: a train.Config, whose attn, lr and seed don't count. data, val: arrays of bytes.
        The losses are a list, with nan for a model that diverged. params: (N, P), see flat.
        """
        params = torch.stack([flat(model) for model in models]).to(self.device).requires_grad_()
        mean, square = torch.zeros_like(params), torch.zeros_like(params)
        rates = torch.tensor(rates, device=self.device)  # (N,)
        n = (len(data) - 1) // config.block_size
        numbers = np.stack([sequence_numbers(seed, config, n) for seed in seeds], axis=1)
        numbers = torch.from_numpy(numbers).to(self.device)  # (steps, N, B)
        data = torch.from_numpy(data.astype(np.int16)).to(self.device)
        limit = config.grad_clip if config.grad_clip > 0 else math.inf  # as in train.py
        decay, betas, eps = self.settings(config)
        for step in range(config.steps):
            tokens = sequences(data, numbers[step], config.block_size)  # (N, B, T + 1)
            # a model's parameters move its own loss alone
            (gradient,) = torch.autograd.grad(self.losses(params, tokens).sum(), params)
            rate = rates * (learning_rate(step, config) / config.lr)
            bias = torch.tensor([1 - beta ** (step + 1) for beta in betas]).to(rate)
            self.update(params, gradient, mean, square, rate, bias, decay, betas, eps, limit)
        return self.evaluate(params, config, val), params

    def settings(self, config):
        """What train.py's optimizer has: (the decay of each parameter, (P,), betas, eps)."""
        optimizer = make_optimizer(self.model, config)
        decay_of = {}
        for group in optimizer.param_groups:
            decay_of |= dict.fromkeys(group["params"], group["weight_decay"])
        parts = [torch.full((size,), decay_of[p])
                 for size, p in zip(self.sizes, self.model.parameters())]
        defaults = optimizer.defaults
        return torch.cat(parts).to(self.device), defaults["betas"], defaults["eps"]

    @torch.no_grad()
    def evaluate(self, params, config, val):
        """The loss of each model on the first sequences of val, as train.evaluate has it."""
        val = torch.from_numpy(val.astype(np.int16)).to(self.device)
        n = max(1, min(config.eval_tokens, len(val) - 1) // config.block_size)
        total = 0
        for numbers in torch.arange(n, device=self.device).split(32):
            tokens = sequences(val, numbers, config.block_size)
            total += self.losses_on_val(params, tokens) * len(numbers)
        return (total / n).tolist()


@torch.no_grad()
def adamw(params, gradient, mean, square, rate, bias, decay, betas, eps, limit):
    """The end of train.training_step: a limit on each model's gradient, and a step of AdamW."""
    norm = gradient.norm(dim=1, keepdim=True)  # (N, 1)
    gradient = gradient * (limit / (norm + 1e-6)).clamp(max=1)  # as in clip_grad_norm_
    rate = rate[:, None]  # (N, 1)
    params.mul_(1 - rate * decay)
    mean.lerp_(gradient, 1 - betas[0])
    square.lerp_(gradient * gradient, 1 - betas[1])
    params.sub_(rate / bias[0] * mean / ((square / bias[1]).sqrt() + eps))
