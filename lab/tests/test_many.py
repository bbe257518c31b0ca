"""lab/many.py: models that are trained at once end as train.py would train each of them."""
from dataclasses import replace

import pytest
import torch
import torch.nn as nn

import train
from data import load_manual
from lab.many import Together, flat
from model import ATTENTION, GPT, Softmax

torch.set_num_threads(1)
RATES = [1e-3, 1e-2]
SEEDS = [1, 2]


class Scaled(Softmax):
    """Softmax with a learned number for each head, of a shape in which it is no matrix."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.scale = nn.Parameter(torch.full((self.h, 1, 1), 2.0))

    def make_map(self, q, k, x, rope):
        return self.scale * super().make_map(q, k, x, rope)


def alone(config, data):
    """The parameters of a run of train.py, (P,)."""
    model = GPT(config, config.seed)
    optimizer = train.make_optimizer(model, config)
    for step in range(config.steps):
        train.training_step(model, optimizer, data, config, step)
    return flat(model)


@pytest.mark.parametrize("settings", [
    dict(grad_clip=0.0),  # no limit
    dict(grad_clip=1e-3),  # a limit that is met at each step
    dict(weight_decay=10.0),
])
def test_models_at_once_end_as_train_py_ends_each(settings, monkeypatch):
    monkeypatch.setitem(ATTENTION, "scaled", Scaled)
    config = replace(
        train.PRESETS["toy"], attn="scaled", kernel="map", device="cpu", vocab_size=257, n_layer=1,
        n_embd=32, block_size=32, total_batch=128, batch_size=4, steps=8, warmup=2,
        eval_tokens=512, **settings)
    data, val = load_manual()
    models = [GPT(config, seed) for seed in SEEDS]
    first = flat(models[0])
    _, params = Together(models[0]).train(models, RATES, SEEDS, config, data, val)
    assert not torch.equal(params[0], first)
    for found, rate, seed in zip(params, RATES, SEEDS):
        expected = alone(replace(config, lr=rate, seed=seed), data)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
