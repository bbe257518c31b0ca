"""lab/arms.py: every arm beside a formula of few lines."""
import math

import pytest
import torch

import lab.arms  # noqa: F401, it adds its classes to model.ATTENTION
import train
from check_arm import check_arm
from model import ATTENTION, GPT, GPTConfig, make_rope, phi, softmax_map
from tests import equations

torch.set_num_threads(1)
T = 20
TINY = dict(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=64)
OURS = [name for name, cls in ATTENTION.items() if cls.__module__ == "lab.arms"]


def make(attn):
    """The second layer in float64, and an input of 20 tokens, longer than the block of 16."""
    layer = GPT(GPTConfig(attn, **TINY)).double().blocks[1].attn
    generator = torch.Generator().manual_seed(0)
    return layer, torch.randn(2, T, 32, dtype=torch.float64, generator=generator)


def maps_of(layer, x):
    """The softmax maps of a layer's queries and keys, (B, H, T, T)."""
    q, k, _ = layer.project(x)
    return softmax_map(q, k, make_rope(layer.config, T, "cpu", x.dtype))


@pytest.mark.parametrize("attn", OURS)
def test_two_forms_agree_and_no_token_sees_a_later_one(attn):
    (config,) = train.parse(["--preset=toy", f"--attn={attn}", "--n_layer=2"])
    check_arm(config)
    layer, x = make(attn)
    assert not layer.map(x).triu(1).any()


@pytest.mark.parametrize("attn", ["softmax_average", "linear_average"])
def test_minus_the_average_is_its_equation_in_numpy(attn):
    layer, x = make(attn)
    weight = {name: p.numpy(force=True) for name, p in layer.named_parameters()}
    found = equations.layer(attn, weight, x.numpy(), 4, depth=1)
    torch.testing.assert_close(layer.map(x), torch.from_numpy(found["A"]))
    torch.testing.assert_close(layer(x), torch.from_numpy(found["y"]))


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
        A = maps_of(layer, x) * D
        z = A.sum(-1, keepdim=True)
    else:
        linear, _ = make("linear")
        linear.load_state_dict(layer.state_dict())
        q, k, _ = layer.project(x)
        counted = (phi(q) @ phi(k).mT).tril()
        A = linear.map(x) * counted.sum(-1, keepdim=True) * D
        z = (counted * D).sum(-1, keepdim=True)
    torch.testing.assert_close(layer.map(x), A / z)


def test_other_signs():
    layer, x = make("softmax_sum")
    maps, lam = maps_of(layer, x), ATTENTION["diff"].lam(layer, x)
    assert lam > 0
    torch.testing.assert_close(layer.map(x), (maps[:, 0::2] + lam * maps[:, 1::2]) / (1 + lam))

    layer, x = make("diff_v2_free_plus")
    maps, lam = maps_of(layer, x), ATTENTION["diff_v2"].lam(layer, x)
    plus = maps[:, 0::2] + lam * maps[:, 1::2]
    torch.testing.assert_close(layer.map(x), plus)

    smaller, _ = make("diff_v2_smaller_plus")
    smaller.load_state_dict(layer.state_dict())
    torch.testing.assert_close(smaller.map(x), plus * (1 - lam) / (1 + lam))
    sums = smaller.map(x).sum(-1, keepdim=True)
    torch.testing.assert_close(sums, (1 - lam).expand_as(sums))  # as in diff_v2


def test_a_sign_that_is_free_starts_as_softmax():
    layer, x = make("diff_v2_free_sign")
    maps = maps_of(layer, x)
    torch.testing.assert_close(layer.map(x), maps[:, 0::2])
    with torch.no_grad():
        layer.lambda_w.fill_(-0.5)
    lam = (x @ layer.lambda_w.mT).tanh().mT[..., None]  # (B, h, T, 1)
    assert lam.min() < 0 < lam.max()
    torch.testing.assert_close(layer.map(x), maps[:, 0::2] - lam * maps[:, 1::2])


def test_a_gated_average_has_the_row_sums_of_the_second_version():
    layer, x = make("gated_average")
    lam = (x @ layer.lambda_proj.weight.mT).sigmoid().mT[..., None]  # (B, h, T, 1)
    U = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
    torch.testing.assert_close(layer.map(x), maps_of(layer, x) - lam * U)


def test_gates():
    gate, x = make("gate")
    expected = maps_of(gate, x) * torch.sigmoid(gate.gate_proj(x)).mT[..., None]
    torch.testing.assert_close(gate.map(x), expected)

    two, x = make("two_gates")
    a, b = torch.sigmoid(two.gate_proj(x)).mT[..., None].unflatten(1, (4, 2)).unbind(2)
    maps = maps_of(two, x)
    torch.testing.assert_close(two.map(x), a * maps[:, 0::2] + b * maps[:, 1::2])


def test_minus_the_own_value():
    own, x = make("softmax_own")
    expected = maps_of(own, x) - own.lambda_average * torch.eye(T).double()
    torch.testing.assert_close(own.map(x), expected)


@pytest.mark.parametrize("attn, factor, first_weight", [
    ("softmax_norm", 1, 1.0),
    ("linear_norm", 1, 1.0),
    ("softmax_factor", 0.6444909, 1.0),  # 1 - lambda_init of the second layer
    ("softmax_factor_small", 0.2, 1.0),
    ("diff_constant", 0.2, 1.0),
    ("diff_norm_low", 0.6444909, 0.2),
    ("diff_no_norm", None, None),
])
def test_norm_and_factor(attn, factor, first_weight):
    layer, x = make(attn)
    y = layer.map(x) @ layer.project(x)[2]  # (B, h, T, d_v)
    if factor is None:
        assert not hasattr(layer, "subln") and layer.lambda_init > 0
    else:
        size = (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        y = factor * first_weight * y / size
    expected = layer.out_proj(y.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-9)
