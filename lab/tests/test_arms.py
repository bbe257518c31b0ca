"""lab/arms.py: every arm beside a formula of few lines."""
import math

import pytest
import torch

from lab import arms
from model import ATTENTION, GPT, GPTConfig, make_rope, phi

torch.set_num_threads(1)
T = 20
TINY = dict(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=64)
OURS = [name for name, cls in ATTENTION.items() if cls.__module__ == "lab.arms"]


def make(attn, **settings):
    """A layer in float64, and an input of 20 tokens, longer than the block of 16."""
    layer = GPT(GPTConfig(attn, **TINY, **settings)).double().blocks[1].attn
    generator = torch.Generator().manual_seed(0)
    return layer, torch.randn(2, T, 32, dtype=torch.float64, generator=generator)


def plain(attn, layer):
    """(a layer of model.py with the parameters of ours, its maps of our x)"""
    other, x = make(attn, subln=layer.config.subln)
    other.load_state_dict({k: v for k, v in layer.state_dict().items() if k in other.state_dict()})
    rope = make_rope(other.config, T, "cpu", x.dtype)
    return other, other.weights(*other.project(x)[:2], rope)


@pytest.mark.parametrize("attn", OURS)
def test_an_arm_is_its_map_without_the_future_and_is_sampled(attn):
    layer, x = make(attn)
    A = layer.map(x)
    expected = layer.output(A @ layer.project(x)[2], x)
    torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-10)
    assert not A.triu(1).any()

    model = GPT(GPTConfig(attn, **TINY))
    idx = torch.arange(6)[None]
    for token in model.generate(idx, 8, temperature=0):
        assert token == model(idx)[0].argmax()  # by all tokens anew
        idx = torch.cat((idx, token[:, None]), dim=1)


@pytest.mark.parametrize("attn, spans", [
    ("softmax_decay", [4, 8, 16, 32]),
    ("linear_decay", [4, 8, 16, 32]),
    ("linear_one_short_head", [4, math.inf, math.inf, math.inf]),
])
def test_decay_makes_far_weights_smaller_before_they_are_normalized(attn, spans):
    layer, x = make(attn)
    distance = (torch.arange(T)[:, None] - torch.arange(T)).double()
    D = torch.stack([(-distance / span).exp().tril() for span in spans])
    if attn == "softmax_decay":
        A = plain("softmax", layer)[1] * D
        z = A.sum(-1, keepdim=True)
    else:
        q, k, _ = layer.project(x)
        counted = (phi(q) @ phi(k).mT).tril()
        A = plain("linear", layer)[1] * counted.sum(-1, keepdim=True) * D
        z = (counted * D).sum(-1, keepdim=True)
    torch.testing.assert_close(layer.map(x), A / z)


@pytest.mark.parametrize("attn, like, sign", [
    ("softmax_sum", "diff", 1), ("diff_v2_minus", "diff_v2", -1), ("diff_v2_plus", "diff_v2", 1),
])
def test_two_maps_whose_sizes_sum_to_1(attn, like, sign):
    layer, x = make(attn)
    other, maps = plain(like, layer)
    lam = other.lam(x)
    assert (lam > 0).all()
    expected = (maps[:, 0::2] + sign * lam * maps[:, 1::2]) / (1 + sign * lam)
    torch.testing.assert_close(layer.map(x), expected)


def test_the_other_arms_by_their_formula():
    own, x = make("softmax_own")
    _, A = plain("softmax", own)
    torch.testing.assert_close(own.map(x), A - own.lambda_average * torch.eye(T, dtype=A.dtype))

    gate, _ = make("gate")
    _, A = plain("softmax", gate)
    torch.testing.assert_close(gate.map(x), A * torch.sigmoid(gate.gate_proj(x)).mT[..., None])
    model = GPT(GPTConfig("gate", 4, 4, 128, vocab_size=257))
    assert sum(p.numel() for p in model.parameters()) == 820_864  # softmax has 820,352

    factor, _ = make("softmax_factor")  # 1 - lambda_init of layer 1 is 0.6444909 (l = 2 in Eq. 3)
    torch.testing.assert_close(factor(x), 0.6444909 * plain("softmax", factor)[0](x))

    large, usual = [GPT(GPTConfig(arm, **TINY)) for arm in ("diff_large_embedding", "diff")]
    assert torch.equal(large.wte.weight, 4 * usual.wte.weight)

    decay, _ = make("diff_linear_decay")  # both maps of a head have the same span
    assert (1 / arms.decay_rates(decay)).flatten().tolist() == pytest.approx([4, 4, 32, 32])
