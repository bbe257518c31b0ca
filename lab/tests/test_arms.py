"""lab/arms.py: every arm beside a formula of few lines."""
import math
import subprocess
import sys

import pytest
import torch

import train
from check_arm import check_arm
from lab import arms
from model import ATTENTION, GPT, GPTConfig, make_rope, phi, softmax_map
from tests.helpers import TOP

torch.set_num_threads(1)
T = 20
TINY = dict(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=64)
arms.register()
OURS = [name for name, cls in ATTENTION.items() if cls.__module__ == "lab.arms"]
FLAGS = ["--preset=toy", "--device=cpu", "--n_layer=1", "--n_embd=16", "--block_size=16",
         "--total_batch=32", "--eval_tokens=64", "--steps=2"]


def make(attn, **settings):
    """A layer in float64, and an input of 20 tokens, longer than the block of 16."""
    layer = GPT(GPTConfig(attn, **TINY, **settings)).double().blocks[1].attn
    generator = torch.Generator().manual_seed(0)
    return layer, torch.randn(2, T, 32, dtype=torch.float64, generator=generator)


def maps_of(layer, x):
    """The softmax maps of a layer's queries and keys, (B, H, T, T)."""
    q, k, _ = layer.project(x)
    return softmax_map(q, k, make_rope(layer.config, T, "cpu", x.dtype))


@pytest.mark.parametrize("attn", OURS)
def test_an_arm_is_its_map_without_the_future_and_is_sampled(attn):
    (config,) = train.parse(["--preset=toy", f"--attn={attn}", "--n_layer=2"])
    check_arm(config)  # that its two forms agree, and that it sees no later token
    layer, x = make(attn, subln=0.0)
    A = layer.map(x)
    y = (A @ layer.project(x)[2]).transpose(1, 2).flatten(2) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x), y, rtol=1e-10, atol=1e-10)
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


def test_both_linear_maps_of_a_head_have_one_span():
    decay, _ = make("diff_linear_decay")
    assert (1 / arms.decay_rates(decay)).flatten().tolist() == pytest.approx([4, 4, 32, 32])


@pytest.mark.parametrize("attn, like, sign, is_divided", [
    ("softmax_sum", "diff", 1, True),
    ("diff_v2_minus", "diff_v2", -1, True),
    ("diff_v2_plus", "diff_v2", 1, True),
    ("diff_v2_free_plus", "diff_v2", 1, False),
])
def test_two_maps_with_a_sign(attn, like, sign, is_divided):
    layer, x = make(attn)
    maps = maps_of(layer, x)
    lam = ATTENTION[like].lam(layer, x)
    assert (lam > 0).all()
    expected = maps[:, 0::2] + sign * lam * maps[:, 1::2]
    if is_divided:
        expected = expected / (1 + sign * lam)
    torch.testing.assert_close(layer.map(x), expected)


def test_a_smaller_plus_has_rows_as_large_as_those_of_diff_v2():
    layer, x = make("diff_v2_smaller_plus")
    maps = maps_of(layer, x)
    lam = ATTENTION["diff_v2"].lam(layer, x)
    expected = (maps[:, 0::2] + lam * maps[:, 1::2]) * (1 - lam) / (1 + lam)
    torch.testing.assert_close(layer.map(x), expected)
    torch.testing.assert_close(expected.sum(-1), (1 - lam[..., 0]).expand(expected.shape[:-1]))


def test_gates():
    gate, x = make("gate")
    expected = maps_of(gate, x) * torch.sigmoid(gate.gate_proj(x)).mT[..., None]
    torch.testing.assert_close(gate.map(x), expected)
    model = GPT(GPTConfig("gate", 4, 4, 128, vocab_size=257))
    assert sum(p.numel() for p in model.parameters()) == 820_864  # softmax has 820,352

    two, x = make("two_gates")
    a, b = torch.sigmoid(two.gate_proj(x)).mT[..., None].unflatten(1, (4, 2)).unbind(2)
    maps = maps_of(two, x)
    torch.testing.assert_close(two.map(x), a * maps[:, 0::2] + b * maps[:, 1::2])


def test_parts_of_diff():
    own, x = make("softmax_own")
    expected = maps_of(own, x) - own.lambda_average * torch.eye(T).double()
    torch.testing.assert_close(own.map(x), expected)

    factor, _ = make("softmax_factor")  # 1 - lambda_init of layer 1 is 0.6444909 (l = 2 in Eq. 3)
    softmax, _ = make("softmax", subln=1.0)
    softmax.load_state_dict(factor.state_dict())
    torch.testing.assert_close(factor(x), 0.6444909 * softmax(x))
    assert make("diff_constant")[0].lambda_init == 0.8


# ---- the program

def test_it_trains_and_samples(capsys):
    assert arms.main([*FLAGS, "--attn=gate", "--out=not--ckpt"]) == 0  # a folder of this name
    assert "val loss" in capsys.readouterr().out
    for flag in (["--ckpt=not--ckpt/gate"], ["--ckpt", "not--ckpt/gate"]):
        assert arms.main([*flag, "--prompt=Once", "--max_new_tokens=3", "--device=cpu"]) == 0
        assert capsys.readouterr().out.startswith("Once")


def test_its_exit_code_is_1_if_a_run_diverged():
    code = arms.main([*FLAGS, "--attn=gate", "--lr=1e30", "--steps=8"])
    assert code == 1 and type(code) is int


def test_help_has_a_line_for_each_arm():
    command = [sys.executable, "-m", "lab.arms", "--help"]
    lines = subprocess.check_output(command, cwd=TOP, text=True).splitlines()
    assert "  gate                   A_ij sigmoid(w . x_i): " in "\n".join(lines)
    assert [line.split()[0] for line in lines[-len(OURS) :]] == OURS
    assert max(map(len, lines)) <= 100
