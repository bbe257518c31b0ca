"""
All the tests, in the order of the README.

    pytest test_model.py            # under 3 minutes on two CPU cores
    pytest test_model.py -m slow    # the long ones
"""
import fcntl
import gzip
import hashlib
import json
import math
import os
import pickle
import re
import random as stdlib_random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import time
from argparse import Namespace
from contextlib import contextmanager, nullcontext, suppress
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend

import bench
import model as model_module
import prepare_fineweb
import sample
import train
from experiments import ablations, recall
from model import ATTENTION, GPT, KERNELS, GPTConfig, Linear, next_token, phi, pick_kernel, rotate
from prepare_fineweb import EOT, Shards, get_tokenizer, load_manifest

HERE = Path(__file__).parent
torch.set_num_threads(1)  # on tensors this small, threads only wait for one another
ALL, DIFF, LINEAR = ["softmax", "diff", "linear", "diff_linear"], ["diff", "diff_linear"], ["linear", "diff_linear"]
TINY = dict(block_size=32, vocab_size=97, n_layer=2, n_head=4, n_embd=32)


def tiny(attn, seed=1337, **overrides):
    return GPT(GPTConfig(attn=attn, **TINY | overrides), seed)


def layer_of(attn, depth=1, dtype=torch.float64, spread=3.0, **overrides):
    """One attention layer, its q, k and norm scaled up so that maps are far from flat and weights far from one."""
    layer = tiny(attn, n_layer=depth + 1, **overrides).to(dtype).blocks[depth].attn
    with torch.no_grad():
        layer.q_proj.weight.mul_(spread / 0.02 / 32**0.5)
        layer.k_proj.weight.mul_(1 / 0.02 / 32**0.5)
        if layer.subln is not None:
            layer.subln.weight.add_(0.3 * torch.randn(layer.subln.weight.shape, generator=seeded(5)))
    return layer


def seeded(n):
    return torch.Generator().manual_seed(n)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def tokens(B, T, seed=0):
    return torch.randint(97, (B, T), generator=seeded(seed))


def steps(layer, x, first=1):
    """layer(x), one token at a time after a prefill of the first ones."""
    state, R = {}, layer.rotation(x)
    y = [layer.prefill(x[:, :first], R[:first], state)]
    return torch.cat(y + [layer.step(x[:, t : t + 1], R[t : t + 1], state) for t in range(first, x.shape[1])], 1)


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


# ---- one idea, three forms


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("attn", ALL)
def test_three_forms_agree(attn, T, decay):
    """Outputs of map, fast form and steps, with a prefill of one token and of many; gradients of map and fast form."""
    layer, x, weight = layer_of(attn, block_size=256, decay=decay), random(2, T, 32), random(2, T, 32, seed=1)
    inputs, found = [x.requires_grad_(), *layer.parameters()], []
    assert len(inputs) == (10 if attn in DIFF else 5)  # x, four projections; four lambda vectors and the norm
    for layer.flash in (True, False):
        y = layer(x)
        found.append([y, *torch.autograd.grad((y * weight).sum(), inputs)])
    for fast, by_map in zip(*found):
        assert (fast - by_map).abs().max() < 1e-10 * max(1, by_map.abs().max())
        assert T <= 2 or fast.abs().max() > 1e-6
    with torch.no_grad():
        for layer.flash, first in ((True, 1), (True, T - T // 3), (False, T - T // 3)):
            assert (steps(layer, x, first) - y).abs().max() < 1e-10


def equations(layer, x, spans):
    """layer(x) and its map, one entry at a time from the papers' equations, with none of model.py's code."""
    (B, T, C), d, H = x.shape, layer.d, layer.n_head
    diff, linear = hasattr(layer, "lambda_q1"), isinstance(layer, Linear)
    q, k, v = ((x @ p.weight.T).numpy(force=True) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    R = np.zeros((T, d, d))  # RoFormer, Eq. 15
    for m in range(T):
        for i in range(d // 2):
            a = m * 10000 ** (-2 * i / d)
            R[m, 2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]]
    maps = np.zeros((B, H, T, T))
    for b, h, i in product(range(B), range(H), range(T)):
        qi, kh = q[b, i, h * d : (h + 1) * d], k[b, : i + 1, h * d : (h + 1) * d]
        D = math.exp(-1 / spans[h // 2 if diff else h]) ** (i - np.arange(i + 1))
        if linear:
            qi, kh = (np.where(u > 0, u + 1, np.exp(np.minimum(u, 0))) for u in (qi, kh))
        rotated = np.array([(R[i] @ qi) @ (R[j] @ kh[j]) for j in range(i + 1)])
        w = rotated if linear else np.exp(rotated / math.sqrt(d))
        maps[b, h, i, : i + 1] = w * D / (kh @ qi @ D if linear else w @ D)
    if diff:
        l1, l2 = ([getattr(layer, f"lambda_{n}{i}").numpy(force=True) for n in "qk"] for i in (1, 2))
        lam = math.exp(l1[0] @ l1[1]) - math.exp(l2[0] @ l2[1]) + layer.lambda_init
        maps = maps[:, 0::2] - lam * maps[:, 1::2]
    y = maps @ v.reshape(B, T, maps.shape[1], -1).transpose(0, 2, 1, 3)
    if layer.subln is not None:
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * layer.subln.weight.numpy(force=True)
        y = y * (1 - layer.lambda_init) if diff else y
    return y.transpose(0, 2, 1, 3).reshape(B, T, C) @ layer.out_proj.weight.numpy(force=True).T, maps


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("subln", [True, False])
@pytest.mark.parametrize("attn", ALL)
def test_the_papers_equations(attn, subln, decay):
    layer, x = layer_of(attn, subln=subln, decay=decay), random(2, 13, 32)
    spans = [4, 64] if attn in DIFF else [4, 4 * 16 ** (1 / 3), 4 * 16 ** (2 / 3), 64]  # from 4 to twice the block of 32
    y, A = equations(layer, x, spans if decay else [math.inf] * 4)
    assert abs(layer.map(x).numpy(force=True) - A).max() < 1e-12
    assert abs(layer(x).numpy(force=True) - y).max() < 1e-12
    assert attn != "diff" or A.min() < -0.01  # signed: nothing clips or normalises it


def test_lambda_init_counts_layers_from_0():
    assert [round(b.attn.lambda_init, 4) for b in tiny("diff", n_layer=4).blocks] == [0.2, 0.3555, 0.4707, 0.5561]
    assert [b.attn.lambda_init for b in tiny("diff", lambda_init=0.5).blocks] == [0.5, 0.5]


@pytest.mark.parametrize("attn", ALL)
def test_scores_depend_on_distance_only_and_are_the_seam(attn):
    layer, x = layer_of(attn, flash=False), random(1, 20, 32)
    q, k = (random(1, 4, 1, 8, seed=s).expand(-1, -1, 20, -1) for s in (1, 2))
    S = layer.scores(q, k, layer.rotation(x))
    assert S.shape == (1, 4, 20, 20) and not torch.allclose(S[..., 1:], S[..., :-1], atol=1e-3)
    assert torch.allclose(S[..., 1:, 1:], S[..., :-1, :-1], rtol=0, atol=1e-12)
    y, A = layer(x), layer.map(x)
    layer.scores = lambda q, k, R: 0 * S  # what a measurement puts there reaches the map and the output
    assert not torch.allclose(layer.map(x), A, atol=1e-3) and not torch.allclose(layer(x), y, atol=1e-6)


def test_rotation_is_exact_far_away():
    """Turning by 10,000,019 - 10,000,000 is turning by 19, in float32 too. With rope_theta = 0 nothing turns."""
    x, q, k = torch.zeros(1, 1, 256), random(1, 1, 1, 64).float(), random(1, 1, 1, 64, seed=1).float()
    turn = lambda y, m, **theta: rotate(y, tiny("linear", n_embd=256, **theta).blocks[0].attn.rotation(x, m))
    near, far = (turn(q, 19) * turn(k, 0)).sum(), (turn(q, 10_000_019) * turn(k, 10_000_000)).sum()
    assert abs(near - far) < 1e-4 and torch.equal(turn(q, 1000, rope_theta=0.0), q)


@pytest.mark.parametrize("attn", ALL)
def test_decay_never_overflows(attn):
    """The shortest span is 4 tokens: over 3,000 of them gamma^(i - j) is 0 in float32, and a division by it infinite."""
    layer, x = layer_of(attn, dtype=torch.float32, decay=True, block_size=4096, flash=True), random(1, 3000, 32)
    with torch.no_grad():
        y = layer(x.float())
        layer.double().flash = False
        assert relative(y, layer(x)) < 1e-4


# ---- numerics that bite


def test_phi_keeps_its_tail_in_bf16():
    x = torch.tensor([-20.0, -7.5, 0.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    (slope,) = torch.autograd.grad(phi(x).sum(), x)
    assert phi(x).tolist() == pytest.approx([math.exp(-20), math.exp(-7.5), 1, 3], rel=1e-2)
    assert slope.tolist() == pytest.approx([math.exp(-20), math.exp(-7.5), 1, 1], rel=1e-2)


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("attn", ALL)
def test_bf16(attn, decay):
    """Each form under autocast, against float64: 2e-2, times (1 + lambda)/(1 - lambda) where maps are subtracted. And
    a model all in bf16, without autocast, runs and is near."""
    model = tiny(attn, block_size=256, decay=decay)
    for layer in (block.attn for block in model.blocks):
        x, lam = random(2, 200, 32), layer.lambda_full().item() if attn in DIFF else 0
        with torch.no_grad():
            expected = layer.double()(x)
            layer.float()
            with torch.autocast("cpu", torch.bfloat16):
                forms = [layer(x.float()), steps(layer, x.float())]
                layer.flash = False
                forms.append(layer(x.float()))
        assert all(1e-6 < relative(y, expected) < 2e-2 * (1 + lam) / (1 - lam) for y in forms)
    with torch.no_grad():
        loss, idx = model(tokens(2, 70), tokens(2, 70))[1], tokens(2, 70)
        assert abs(model.bfloat16()(idx, idx)[1] - loss) < 2e-2 and len(list(model.generate(idx[:, :5], 8))) == 8


@pytest.mark.parametrize("attn", ["softmax", "diff"])
def test_a_steps_scores_are_not_rounded_to_bf16(attn):
    """With large scores a step under autocast is as near to float64 as the fast form, within a half."""
    layer, x = layer_of(attn, spread=8.0, block_size=256), random(2, 200, 32)
    with torch.no_grad():
        expected = layer(x)
        layer.float()
        with torch.autocast("cpu", torch.bfloat16):
            assert relative(steps(layer, x.float()), expected) < 1.5 * relative(layer(x.float()), expected)


def test_long_sums_stay_in_float32():
    """Under autocast a sum of 8,192 bf16 features is right; a plain bf16 sum is not."""
    k, plain = phi(torch.randn(8192, generator=seeded(0))).bfloat16(), torch.zeros((), dtype=torch.bfloat16)
    for x in k:
        plain += x
    assert abs(plain - k.double().sum()) > 1000
    layer, x = layer_of("linear", dtype=torch.float32), random(1, 8192, 32)
    state, exact = {}, {}
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            y = layer.prefill(x.float(), layer.rotation(x.float()), state)
        expected = layer.double().prefill(x, layer.rotation(x), exact)
    assert relative(y[:, -64:], expected[:, -64:]) < 2e-2
    for name in ("S", "Z"):
        assert state[name].dtype == torch.float32 and relative(state[name], exact[name]) < 5e-3


# ---- the model around them


@pytest.mark.parametrize("wrong", ["attn=cosine", "n_embd=30", "n_embd=36", "n_head=1", "n_layer=0"])
def test_impossible_models_are_refused(wrong):
    name, value = wrong.split("=")
    with pytest.raises(ValueError, match=name):
        GPTConfig(**TINY | dict(attn="diff") | {name: value if name == "attn" else int(value)})


def test_parameters_are_equal_but_for_lambda_and_norm():
    sizes, d, layers = [sum(p.numel() for p in tiny(attn).parameters()) for attn in ALL], 8, 2
    assert sizes == [sizes[0], sizes[0] + layers * (4 * d + 2 * d)] * 2
    names = {name for name, _ in tiny("diff").blocks[0].attn.named_parameters()}
    assert names == {"q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight", "subln.weight",
                     "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"}  # fmt: skip
    N = 50304 * 768 + 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768  # GPT-2 small
    for attn in ALL:
        assert GPT(GPTConfig(attn=attn), seed=None).flops_per_token(1024) == 6 * N + 12 * 12 * 768 * 1024


def digest(model):
    return {name: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for name, p in model.named_parameters()}


def test_shared_parameters_are_the_same_bits():
    models = {attn: digest(tiny(attn)) for attn in ALL}
    torch.manual_seed(3)  # whatever the global generator is doing
    assert models["softmax"] == digest(tiny("linear")) and models["diff"] == digest(tiny("diff_linear"))
    assert models["softmax"].items() <= models["diff"].items()
    other = digest(tiny("softmax", seed=2))
    assert all((other[n] == models["softmax"][n]) == ("norm" in n) for n in other)


def test_init_has_the_stated_spread_and_guesses():
    model = GPT(GPTConfig(attn="diff", n_layer=3, n_head=8, n_embd=256, vocab_size=512, subln_init=0.2))
    for name, p in model.named_parameters():
        end = "out_proj" in name or "down_proj" in name
        std = 0.1 if "lambda" in name else 0.02 / 6**0.5 if end else 0.02
        if "norm" in name or "subln" in name:
            assert torch.equal(p, torch.full_like(p, 0.2 if "subln" in name else 1.0))
        else:
            assert p.std().item() == pytest.approx(std, rel=0.3 if p.numel() < 100 else 0.03)
    for attn in ALL:
        model, idx = tiny(attn), tokens(4, 257)
        logits, loss = model(idx[:, :-1], idx[:, 1:])
        assert logits.shape == (4, 256, 97) and not logits.requires_grad
        assert loss.item() == pytest.approx(math.log(97), rel=0.03)
        last, nothing = model(idx[:, :-1])
        assert nothing is None and torch.allclose(last, logits[:, -1:], atol=1e-5)


@pytest.mark.parametrize("attn", ALL)
def test_compiles_to_one_graph_for_any_length(attn):
    torch._dynamo.reset()
    model = tiny(attn, n_layer=1, decay=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for T in (65, 64):
        loss = compiled(tokens(3, T), tokens(3, T))[1]
        loss.backward()
        assert loss.item() == pytest.approx(model(tokens(3, T), tokens(3, T))[1].item(), abs=1e-5)


@pytest.mark.parametrize("attn", ALL)
def test_overfits_one_batch_and_every_parameter_learns(attn):
    torch.manual_seed(0)
    model, idx = tiny(attn, decay=True), tokens(4, 33)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(200):
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        if loss < 0.1:
            return
        optimizer.zero_grad()
        loss.backward()
        assert step > 0 or all(p.grad.abs().max() > 0 for p in model.parameters())
        optimizer.step()
    assert loss < 0.1


# ---- one token at a time


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("prompt", [1, 40])
@pytest.mark.parametrize("attn", ALL)
def test_greedy_steps_equal_recomputation(attn, prompt, decay):
    """Every token is the argmax of a full forward pass over what is kept, before and beyond block_size."""
    model = tiny(attn, block_size=16, decay=decay).double()
    with torch.no_grad():
        for p in model.blocks.parameters():
            p.mul_(8)  # so that the context speaks louder than the last token
        idx = tokens(2, prompt, seed=1)
        made = torch.stack(list(model.generate(idx, 60, temperature=0)), 1)
        kept = idx if attn in LINEAR else idx[:, -16:]
        for t in range(60):
            if attn not in LINEAR and kept.shape[1] > 16:
                kept = kept[:, -8:]
            assert torch.equal(model(kept)[0][:, -1].argmax(-1), made[:, t])
            kept = torch.cat((kept, made[:, t : t + 1]), 1)
    assert made.dtype == torch.int64 and len(set(made[0].tolist())) > 5  # not one token for ever


@pytest.mark.parametrize("attn", ALL)
def test_a_step_is_one_graph_and_its_state_has_one_size(attn):
    """Compiled with static shapes it says what it says without, over refills, and is compiled once."""
    torch._dynamo.reset()
    model, sizes = tiny(attn, block_size=16, n_layer=1, decay=True).double(), set()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model.step, backend=counter, fullgraph=True)
    for prompt in (7, 3):
        idx = tokens(2, prompt, seed=prompt)
        eager, compiled = (torch.stack(list(model.generate(idx, 40, temperature=0, step=s))) for s in (None, step))
        assert torch.equal(eager, compiled)
    assert counter.frame_count == 1
    with torch.no_grad():
        _, state = model.prefill(tokens(1, 5))
        for token in tokens(1, 11).T:
            model.step(token[:, None], state)
            sizes.add(sum(t.numel() for s in state for t in s.values()))
        assert len(sizes) == 1
        with nullcontext() if attn in LINEAR else pytest.raises((IndexError, RuntimeError)):  # 16 tokens: it is full
            model.step(token[:, None], state)


def test_choices_follow_temperature_top_k_and_top_p():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits, g = p.log()[[2, 0, 3, 1]].expand(20_000, -1), seeded(0)  # token 1 is likeliest, then 3, 0, 2
    top_2, top_3 = [0.625, 0.375, 0, 0], [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]
    cases = [(1, None, None, p.tolist()), (0, None, None, [1, 0, 0, 0]), (0.5, None, None, (p**2 / (p**2).sum()).tolist()),
             (1, 2, None, top_2), (1, 99, None, p.tolist()), (1, None, 0.79, top_2), (1, None, 0.81, top_3),
             (1, 2, 0.6, [1, 0, 0, 0]), (1, None, 1.0, p.tolist()), (1, None, 1e-50, [1, 0, 0, 0]),
             (1e-50, None, None, [1, 0, 0, 0])]  # fmt: skip
    for temperature, top_k, top_p, expected in cases:
        chosen = torch.bincount(next_token(logits, temperature, top_k, top_p, g)[:, 0], minlength=4)[[1, 3, 0, 2]]
        assert (chosen / 20_000).tolist() == pytest.approx(expected, abs=0.02)
    model, idx = tiny("diff"), torch.zeros(3, 4, dtype=torch.int64)
    once, again = (torch.stack(list(model.generate(idx, 20, generator=seeded(4)))) for _ in range(2))
    assert torch.equal(once, again) and len({tuple(row) for row in once.T.tolist()}) == 3 and once.max() < 97
    for wrong in (dict(temperature=-1), dict(top_k=0), dict(top_p=0.0), dict(top_p=1.5)):
        with pytest.raises(ValueError):
            next(model.generate(idx, 1, **wrong))


# ---- saving and loading


def test_save_and_load(tmp_path, monkeypatch):
    for attn in ALL:
        model, idx = tiny(attn, subln=True, lambda_init=0.4, decay=True, subln_init=0.2), tokens(1, 9)
        model.save(tmp_path / "ckpt.pt", tokenizer="bytes", step=7, curve=torch.arange(3))
        loaded = GPT.load(tmp_path / "ckpt.pt")
        assert loaded.config == model.config and torch.equal(loaded(idx)[0], model(idx)[0])
        assert loaded.extra["step"] == 7 and loaded.extra["curve"].tolist() == [0, 1, 2]
    monkeypatch.setattr(torch, "save", lambda obj, f: (f.write(b"half"), 1 / 0))
    with pytest.raises(ZeroDivisionError):  # a save that fails leaves the old file
        model.save(tmp_path / "ckpt.pt", step=8)
    assert GPT.load(tmp_path / "ckpt.pt").extra["step"] == 7 and os.listdir(tmp_path) == ["ckpt.pt"]


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("boom",)


def test_load_refuses_what_is_not_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny("diff")
    model.save("good.pt")
    whole = Path("good.pt").read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(model.wte.weight.detach().numpy().tobytes()) + 1000] ^= 16  # one bit of one weight
    bad = dict(empty=b"", cut=whole[: len(whole) // 2], almost=whole[:-100], flipped=flipped, bomb=pickle.dumps(Bomb(), 2))
    for name, content in bad.items():
        Path(name).write_bytes(content)
    for name, config in dict(foreign=None, bomb2=Bomb(), misfit=dict(TINY), unknown=dict(attn="quadratic")).items():
        torch.save({"config": config, "model": {"wte.weight": torch.zeros(3)}}, name)
    model.blocks[0].attn.lambda_q1.data[3] = math.nan
    model.save("infinite")
    for name in [*bad, "foreign", "bomb2", "misfit", "unknown", "infinite"]:
        with pytest.raises(ValueError, match=name) as e:
            GPT.load(name)
        assert "\n" not in str(e.value)
    assert not Path("boom").exists()


# ---- data


def test_rearranged_expression_has_the_same_tokens():
    try:
        fast, plain, draw = get_tokenizer("gpt2"), tiktoken.get_encoding("gpt2"), stdlib_random.Random(0)
    except OSError as e:
        pytest.skip(str(e))
    parts = [*" \n\t\r\x1c\x85\u00a0\u3000\u2028'aAzé雪ก5½²_-.😀\u0301\u200d\0", "  ", "\n\n", "'ll", EOT]
    for _ in range(3000):
        text = "".join(draw.choices(parts, k=60))
        assert fast.encode_ordinary(text) == plain.encode_ordinary(text), repr(text)


STAND_IN = HERE / "../shared/data/fineweb-edu"  # novels and a factbook in the layout of FineWeb-Edu


def documents(n, seed=0):
    words, draw = "to be or not 雪 to be that is the question".split(), stdlib_random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randrange(60))) for _ in range(n)]


def write_source(path, texts):
    """texts as a file of the kind that path's suffix names, or as a folder of parquet files with a config "small"."""
    from pyarrow import parquet, table

    lines = "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)).encode()
    data = {".txt": "".join(texts).encode(), ".jsonl": lines, ".gz": gzip.compress(lines)}
    if path.suffix in data:
        path.write_bytes(data[path.suffix])
    elif path.suffix == ".parquet":
        parquet.write_table(table({"id": list(range(len(texts))), "text": texts}), path, row_group_size=100)
    else:
        path.mkdir()
        config = "configs: [{config_name: small, data_files: [{split: train, path: '*.parquet'}]}]"
        (path / "README.md").write_text(f"---\n{config}\n---\n")
        write_source(path / "0.parquet", texts[:150])
        write_source(path / "1.parquet", texts[150:])
    return path


def prepare(source, out, *flags):
    prepare_fineweb.main([f"--source={source}", f"--out={out}", "--tokenizer=bytes", "--procs=2", *flags])


def refused(*args):
    with pytest.raises(ValueError) as e:
        prepare(*args)
    return str(e.value)


def as_bytes(texts):
    return [token for text in texts for token in (256, *text.encode())]


def tokens_of(folder):
    """An independent reader of the format."""
    tokens = []
    for path in sorted(folder.glob("*.bin"), key=lambda path: path.stem[-6:]):
        data = path.read_bytes()
        assert struct.unpack("<256i", data[:1024]) == (20240520, 1, len(data) // 2 - 512, *[0] * 253)
        tokens += np.frombuffer(data[1024:], "<u2").tolist()
    return tokens


def shards_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


@pytest.mark.parametrize("kind", ["x.txt", "x.jsonl", "x.jsonl.gz", "x.parquet", "folder"])
def test_goes_on_after_every_shard(tmp_path, kind):
    texts = documents(400) + ["long " * 5000, f"a {EOT} b\r\n\x00 \u2028", ""] + documents(300, seed=1)
    source, flags = write_source(tmp_path / kind, texts), ("--shard_tokens=2e4", "--val_tokens=3e3", "--name=small")
    prepare(source, tmp_path / "whole", *flags)
    whole = shards_of(tmp_path / "whole")
    tokens = as_bytes(["".join(texts)] if kind == "x.txt" else texts)
    assert tokens_of(tmp_path / "whole") == tokens
    train, _, name, _ = prepare_fineweb.load_data(tmp_path / "whole")
    assert name == "bytes" and train.sequence(20, 999).tolist() == tokens[22_980:23_980]  # across a seam
    manifest = load_manifest(tmp_path / "whole")
    shards = manifest["shards"]
    assert [s["tokens"] for s in shards[:2]] == [3000, 20000]
    assert sum(s["documents"] for s in shards) == tokens.count(256)
    for n in range(len(shards)):  # killed after shard n had got its name and before it was in the manifest
        out = tmp_path / f"o{n}"
        out.mkdir()
        for shard in shards[: n + 1]:
            (out / shard["file"]).write_bytes(whole[shard["file"]])
        (out / "manifest.json").write_text(json.dumps(manifest | {"source_ended": False, "shards": shards[:n]}))
        (out / "shard.tmp").write_bytes(b"half")
        prepare(source, out, *flags)
        assert shards_of(out) == whole, n


def test_exact_number_of_tokens_and_more_of_them_later(tmp_path, capsys):
    texts, out = documents(400), tmp_path / "o"
    source = write_source(tmp_path / "x.jsonl", texts)
    for tokens in (2500, 9000, 12000, 1e9):
        prepare(source, out, "--shard_tokens=4e3", f"--tokens={tokens}")
        assert tokens_of(out) == as_bytes(texts)[: int(tokens)]
    prepare(source, out, "--shard_tokens=4e3")
    assert "finished before" in capsys.readouterr().out
    assert "not 10,000" in refused(source, out, "--shard_tokens=4e3", "--tokens=1e4")


def test_another_source_setting_or_program_is_refused(tmp_path):
    source, out = write_source(tmp_path / "x.jsonl", documents(200)), tmp_path / "o"
    prepare(source, out, "--shard_tokens=2e3", "--tokens=5e3")
    assert "shard_tokens 2000, not 3000" in refused(source, out, "--shard_tokens=3e3")
    assert "tokenizer bytes, not gpt2" in refused(source, out, "--shard_tokens=2e3", "--tokenizer=gpt2")
    with open(out / ".lock") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        assert "another run" in refused(source, out, "--shard_tokens=2e3")
    write_source(source, documents(201))
    assert "has changed" in refused(source, out, "--shard_tokens=2e3")
    shard = out / "finewebedu_train_000001.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "cut or damaged" in refused(source, out, "--shard_tokens=2e3")
    shard.write_bytes(bytes(2024))
    assert "is not a token shard" in refused(source, out, "--shard_tokens=2e3")
    (out / "manifest.json").unlink()
    assert "not made here" in refused(source, out)


@pytest.mark.parametrize("name, data, says", [
    ("no.txt", b"\xff", "'utf-8' codec can't decode byte 0xff"),
    ("cut.jsonl.gz", gzip.compress(b'{"text": "one"}\n')[:-9], "Compressed file ended"),
    ("null.jsonl", b'{"text": "one"}\n{"text": null}\n', "'None' is not an instance of 'str'"),
    ("field.jsonl", b'{"body": "x"}\n', "has no column text"),
    ("broken.parquet", b"PAR1" + bytes(100) + b"PAR1", "broken.parquet: "),
])  # fmt: skip
def test_bad_source(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    message = refused(tmp_path / name, tmp_path / "o")
    assert name in message and says in message and "\n" not in message


def test_no_network(tmp_path):
    command = [sys.executable, HERE / "prepare_fineweb.py", "--source=nobody/nothing", "--tokenizer=bytes", "--out=o"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=offline)
    assert run.returncode == 1 and run.stderr.count("\n") == 1 and "nobody/nothing" in run.stderr, run.stderr


def test_pretokenized(tmp_path, monkeypatch):
    hub, made, out = pytest.importorskip("huggingface_hub"), tmp_path / "made", tmp_path / "o"
    prepare(write_source(tmp_path / "x.jsonl", documents(200)), made, "--shard_tokens=2e3")
    monkeypatch.setattr(hub, "list_repo_files", lambda repo, repo_type: ["README.md", *os.listdir(made)])
    monkeypatch.setattr(hub, "hf_hub_download", lambda repo, name, local_dir, **_: shutil.copy(made / name, local_dir))
    prepare_fineweb.main(["--pretokenized", f"--out={out}", "--tokens=3e3"])
    assert tokens_of(out) == tokens_of(made)[:4000]
    prepare_fineweb.main(["--pretokenized", f"--out={out}"])
    assert shards_of(out) == shards_of(made) and prepare_fineweb.load_data(out)[2] == "gpt2"


@pytest.mark.slow
@pytest.mark.skipif(not STAND_IN.exists(), reason="the data beside the project is not there")
def test_killed_at_random_moments_and_little_memory(tmp_path):
    flags = ["--source", STAND_IN, "--name=sample-10BT", "--shard_tokens=5e5", "--procs=2", "--out"]
    command = [sys.executable, HERE / "prepare_fineweb.py", *flags]
    _, status, usage = os.wait4(subprocess.Popen([*command, tmp_path / "whole"]).pid, 0)
    assert status == 0 and usage.ru_maxrss < 600e3
    for seconds in (0.5, 2, 3, 4):
        with suppress(subprocess.TimeoutExpired):  # which comes with a SIGKILL
            subprocess.run([*command, tmp_path / "killed"], timeout=seconds)
    subprocess.run([*command, tmp_path / "killed"], check=True)
    assert shards_of(tmp_path / "killed") == shards_of(tmp_path / "whole")
    assert sum(map(len, shards_of(tmp_path / "whole").values())) == 2 * 20_349_806 + 41 * 1024


# ---- training


def arguments(*flags):
    return train.parse(["--device=cpu", *flags])[0]


def test_every_sequence_is_seen_once_per_epoch():
    """In every split into processes and micro-steps the same tokens in the same step."""
    data = Shards([np.arange(1001, dtype="<u2") % 500])  # 100 sequences of 10
    args = arguments("--block_size=10", "--batch_size=4", "--total_batch=40", "--steps=50")
    for epoch in range(2):
        starts = []
        for step in range(25 * epoch, 25 * epoch + 25):
            tokens = train.batch(data, args, step, 0, 500)
            assert tokens.shape == (4, 11) and torch.equal(tokens % 500, (tokens[:, :1] + torch.arange(11)) % 500)
            starts += tokens[:, 0].tolist()
            for world, micro_steps in ((1, 2), (2, 1), (2, 2), (4, 1)):
                split, parts = Namespace(**vars(args) | dict(world=world, batch_size=4 // world // micro_steps)), []
                for micro, split.rank in product(range(micro_steps), range(world)):
                    parts.append(train.batch(data, split, step, micro, 500))
                assert torch.equal(torch.cat(parts), tokens)
        assert sorted(starts) == sorted([10 * i % 500 for i in range(100)]) != starts


def test_learning_rate():
    args = arguments("--steps=100", "--warmup=10", "--lr=1")
    rates = [train.learning_rate(s, args) for s in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1 and np.allclose(np.diff(rates[10:]), -1 / 90)
    assert arguments("--steps=5").warmup == 4 and train.learning_rate(0, arguments("--steps=1")) > 0


def test_run_folder_names_what_differs():
    out = lambda *flags: str(arguments(*flags).out)
    assert out("--attn=diff") == out("--attn=diff", "--lr=2e-3", "--seed=1337", "--steps=9") == "out/diff"
    assert out("--attn=diff", "--no-subln", "--lr=3e-3", "--seed=2") == "out/diff-nosubln-lr3e-3-seed2"
    assert out("--lambda_init=0.5", "--n_layer=2", "--no-flash") == "out/softmax-n_layer2-noflash-lambda_init0.5"
    assert out("--seed=9007199254740993") == "out/softmax-seed9007199254740993"  # a float would end in 2
    assert out("--lr=0.00123456789") != out("--lr=0.00123456788") and out("--out=here") == "here"
    assert [str(run.out) for run in train.parse(["--seed=1,2,1", "--out=x"])] == ["x/softmax-seed1", "x/softmax-seed2"]


def test_presets_and_processes(monkeypatch):
    toy, gpt2 = arguments(), arguments("--preset=gpt2")
    assert [toy.n_layer, toy.n_head, toy.n_embd, toy.block_size, toy.batch_size, toy.steps] == [4, 4, 128, 256, 8, 500]
    assert [toy.total_batch, toy.lr, toy.warmup, toy.data] == [2048, 2e-3, 50, None]
    assert [gpt2.n_layer, gpt2.n_embd, gpt2.total_batch, gpt2.steps, gpt2.warmup] == [12, 768, 524288, 5341, 375]
    assert arguments("--tokens=1e6").steps == math.ceil(1e6 / 2048) and arguments("--batch_size=4").total_batch == 1024
    monkeypatch.setenv("RANK", "2")  # torchrun sets both
    with pytest.raises(ValueError, match="RANK=2 does not fit WORLD_SIZE=1"):
        arguments()
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert arguments("--total_batch=7680").batch_size == 5  # the next below 8 that divides


die = lambda: os.kill(os.getpid(), signal.SIGKILL)
SMALL = ["--device=cpu", "--n_layer=1", "--n_embd=32", "--n_head=2", "--block_size=32", "--batch_size=4", "--steps=6"]
LOUD = [*SMALL, "--steps=24", "--eval_every=8", "--log_every=1", "--save_every=2", "--eval_tokens=256"]


def test_train_writes_a_run_and_sample_reads_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("any.txt").write_text("Once upon a time there was a Größe 🙂. " * 200, encoding="utf-8")
    flags = [*SMALL, "--attn=diff", "--data=any.txt", "--out=out/x"]
    assert train.main([*flags, "--eval_every=4", "--log_every=2"])
    assert "step     6/6" in capsys.readouterr().out
    head, lines = train.read_log("out/x/log.jsonl")
    assert (head["attn"], head["tokenizer"], head["torch"]) == ("diff", "bytes", torch.__version__)
    assert [(line["step"], line["tokens"]) for line in lines] == [(0, 0), (2, 2 * 128), (4, 4 * 128), (6, 6 * 128)]
    assert {"train_loss", "lr", "grad_norm", "tok_per_s", "mfu"} <= lines[1].keys() and "val_loss" not in lines[1]
    assert all(line["val_loss"] > 0 and len(line["lambda"]) == 1 and line["sample"] for line in lines[::2])
    before = Path("out/x/log.jsonl").read_bytes(), os.path.getmtime("out/x/ckpt.pt")
    assert train.main([*flags, "--save_every=3", "--log_every=1"]) and "finished" in capsys.readouterr().out
    assert before == (Path("out/x/log.jsonl").read_bytes(), os.path.getmtime("out/x/ckpt.pt"))
    # the newest checkpoint under out/; the same seed says the same; the prompt may be empty or longer than the block
    for prompt, dtype in (("Once upon a time", "float32"), ("", "bfloat16"), ("Größe 🙂" * 20, "float32")):
        how = [f"--prompt={prompt}", "--max_new_tokens=9", "--num_samples=2", "--device=cpu", f"--dtype={dtype}"]
        sample.main(how)
        out, err = capsys.readouterr()
        sample.main(how)
        assert out == capsys.readouterr().out and out.startswith(prompt) and "tokens/s" in err and "sample 2\n" in out


def test_sample_streams_whole_characters_and_stops_at_eot(tmp_path, monkeypatch, capsys):
    tiny("softmax", vocab_size=257).save(tmp_path / "ckpt.pt", tokenizer="bytes")
    first, second = "é🙂".encode(), b"ab"
    script = [torch.tensor(row) for row in zip([*first, 256, 65, 65], [*second, 256, 65, 65, 65, 65, 65, 65])]
    monkeypatch.setattr(GPT, "generate", lambda self, idx, n, **how: iter(script))
    written = []
    monkeypatch.setattr(sys.stdout, "write", lambda s: written.append(s), raising=False)
    sample.main([f"--ckpt={tmp_path}", "--num_samples=2", "--device=cpu"])
    assert "".join(written) == "é🙂\n\n--- sample 2\nab\n" and "🙂" in written
    assert "8 tokens in" in capsys.readouterr().err


def trace(folder):
    """A run's log without what a clock says, and its weights."""
    records, model = train.read_log(folder / "log.jsonl")[1], GPT.load(folder / "ckpt.pt")
    assert model.extra["step"] == records[-1]["step"]
    kept = [{k: v for k, v in record.items() if k not in ("tok_per_s", "mfu")} for record in records]
    return kept, {name: p.tolist() for name, p in model.named_parameters()}


def forked(*flags, before=lambda: None):
    """The exit code of train.py in a child process, which has everything imported already."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        before()
        code = 1 if train.main(flags) is False else 0
    except (ValueError, OSError) as e:
        print(e, file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def at_call(n, owner, name, action):
    """Replaces owner.name, in a child: before its n-th call (counted from 1) it does action."""
    inner, calls = getattr(owner, name), []

    def replacement(*args, **kwargs):
        calls.append(1)
        if len(calls) == n:
            action()
        return inner(*args, **kwargs)

    return lambda: setattr(owner, name, replacement)


@pytest.mark.parametrize("attn,more", [("softmax", []), ("diff_linear", ["--batch_size=2", "--total_batch=256"])])
def test_killed_anywhere_it_ends_in_the_same_bits(tmp_path, attn, more):
    flags, out = [*LOUD, f"--attn={attn}", *more], f"--out={tmp_path / 'cut'}"
    assert forked(*flags, f"--out={tmp_path / 'whole'}") == 0
    # a save is fsync of the log, fsync of the checkpoint, replace; the first is that of step 0
    for n, name in ((1, "fsync"), (1, "replace"), (2, "fsync"), (3, "fsync"), (2, "replace"), (6, "fsync")):
        assert forked(*flags, out, before=at_call(n, os, name, die)) == -signal.SIGKILL
    for n in (2, 5, 3):
        assert forked(*flags, out, before=at_call(n, train, "learning_rate", die)) == -signal.SIGKILL
    assert forked(*flags, out) == 0 and trace(tmp_path / "cut") == trace(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(tmp_path, capfd, number):
    assert forked(*LOUD, "--attn=diff", f"--out={tmp_path / 'whole'}") == 0
    run = [*LOUD, "--log_every=3", "--attn=diff", f"--out={tmp_path / 'run'}"]

    def before():
        signal.signal(number, train.on_signal)
        at_call(5, train, "learning_rate", lambda: os.kill(os.getpid(), number))()

    assert forked(*run, before=before) == 0 and "stopped after step 5 of 24" in capfd.readouterr().out
    assert GPT.load(tmp_path / "run/ckpt.pt").extra["step"] == 5
    assert [record["step"] for record in train.read_log(tmp_path / "run/log.jsonl")[1]] == [0, 3]
    assert forked(*run) == 0
    records, weights = trace(tmp_path / "whole")
    assert trace(tmp_path / "run") == ([r for r in records if r["step"] % 3 == 0 or r["step"] % 8 == 0], weights)


def test_the_last_good_checkpoint_stays(tmp_path, monkeypatch, capfd):
    """On a full disk, and when the loss is not finite."""
    full = [*LOUD, f"--out={tmp_path / 'full'}"]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    assert forked(*full, before=at_call(4, train, "learning_rate", limit)) == 1
    err = capfd.readouterr().err
    assert "File too large" in err and err.count("\n") == 1 and GPT.load(tmp_path / "full/ckpt.pt").extra["step"] == 2
    assert forked(*full) == 0 and forked(*LOUD, f"--out={tmp_path / 'whole'}") == 0
    assert trace(tmp_path / "full") == trace(tmp_path / "whole")
    rate = train.learning_rate
    early = lambda step, args: 1e30 if step == 5 else rate(step, args)
    monkeypatch.setattr(train, "learning_rate", early)
    assert forked(*LOUD, f"--out={tmp_path / 'wild'}") == 1
    assert "stops at step" in capfd.readouterr().err and "NaN" not in (tmp_path / "wild/log.jsonl").read_text()
    assert GPT.load(tmp_path / "wild/ckpt.pt").extra["step"] in (4, 6)  # load refuses weights that are not finite


def test_another_run_is_refused_and_another_pace_is_not(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("any.txt").write_text("Once upon a time there was another text. " * 900)
    flags = [*LOUD, "--attn=diff", "--steps=4", "--out=run"]
    assert forked(*flags, before=at_call(3, train, "learning_rate", die)) == -signal.SIGKILL
    content = [path.read_bytes() for path in sorted(Path("run").iterdir())]
    for flag, says in (("--attn=softmax", "attn is 'diff' there and 'softmax' here"), ("--n_embd=64", "n_embd"),
                       ("--lr=1", "lr is 0.002 there and 1.0 here"), ("--seed=2", "seed"), ("--steps=5", "steps"),
                       ("--data=any.txt", "data_sha256"), ("--eval_tokens=512", "eval_tokens")):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            train.main([*flags, flag])
        assert content == [path.read_bytes() for path in sorted(Path("run").iterdir())]
    with open("run/log.jsonl", "ab") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another run is writing"):
            train.main([*flags, "--restart"])
    assert train.main([*flags, "--save_every=1", "--log_every=2", "--eval_every=2", "--dtype=bfloat16", "--no-flash"])
    assert train.main([*flags, "--lr=1e-3", "--restart"]) and train.read_log("run/log.jsonl")[0]["lr"] == 1e-3
    # another run's checkpoint comes into the folder after the first look, before the lock is taken
    tiny("diff", vocab_size=257).save("other.pt", tokenizer="bytes", step=2)
    lock = train.lock
    monkeypatch.setattr(train, "lock", lambda *args: (lock(*args), os.replace("other.pt", "run/ckpt.pt")))
    with pytest.raises(ValueError, match="n_layer is 2 there and 1 here"):
        train.main([*flags, "--lr=1e-3"])


def test_a_comparison_goes_on_where_it_stopped(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(ATTENTION, "mine", type("Mine", (ATTENTION["linear"],), {}))  # an arm from another file
    flags = [*LOUD, "--steps=8", "--attn=softmax,mine", "--seed=1,2", "--lr=1e-3,3e-3", f"--out={tmp_path}"]
    assert forked(*flags, before=at_call(4 * 8 + 4, train, "learning_rate", die)) == -signal.SIGKILL
    assert forked(*flags, "--kernel=sdpa") == 0  # the linear arm goes without
    out = capfd.readouterr().out
    assert out.count(": finished, 8 steps") == 4 and out.count("goes on after step 2") == 1
    assert f"python bench.py loss {tmp_path}" in out and len(list(tmp_path.glob("*/ckpt.pt"))) == 8
    assert forked(*LOUD, "--steps=8", "--attn=mine", "--seed=2", "--lr=3e-3", f"--out={tmp_path / 'alone'}") == 0
    assert trace(tmp_path / "alone") == trace(next(tmp_path.glob("mine-*lr3e-3-seed2")))


def test_two_processes_give_the_losses_of_one(tmp_path):
    flags = [*LOUD, "--total_batch=512", "--eval_tokens=1600", "--attn=diff_linear"]
    assert forked(*flags, f"--out={tmp_path / '1'}") == 0
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", HERE / "train.py"]
    done = run(*torchrun, *flags, f"--out={tmp_path / '2'}", cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and done.stdout.count("step    24") == 1 and "2 processes" in done.stdout, done.stderr
    for a, b in zip(trace(tmp_path / "1")[0], trace(tmp_path / "2")[0], strict=True):
        for key in ("train_loss", "val_loss", "lr", "tokens"):
            assert a.get(key) == pytest.approx(b.get(key), abs=1e-5)


@pytest.mark.parametrize("attn", ALL)
def test_compiled_training_has_one_graph_to_train_and_one_to_evaluate(tmp_path, monkeypatch, attn):
    compile, graphs = torch.compile, []
    backend = lambda graph, inputs: graphs.append(graph) or graph.forward
    monkeypatch.setattr(torch, "compile", lambda model: compile(model, backend=backend, fullgraph=True))
    assert train.main([*LOUD, "--compile", f"--attn={attn}", "--eval_tokens=320", f"--out={tmp_path}"])
    assert len(graphs) == 2


# ---- kernels


def fake_kernels(monkeypatch):
    """On a CPU: flash_attn_func, as far as model.py uses it, and cudnn and efficient by PyTorch's plain path, which takes
    their shapes too. Returns what was called."""
    calls = []

    def flash_attn_func(q, k, v, softmax_scale, causal, alibi_slopes):  # (B, T, H, d), d_v = d
        assert causal and q.shape == k.shape == v.shape and softmax_scale == q.shape[-1] ** -0.5
        calls.append("flash_attn")
        i = torch.arange(q.shape[1])
        slopes = torch.zeros(q.shape[2]) if alibi_slopes is None else alibi_slopes
        S = torch.einsum("bihd,bjhd->bhij", q, k) * softmax_scale - slopes[:, None, None] * (i[:, None] - i).abs()
        S = S.masked_fill(i > i[:, None], -math.inf)
        return torch.einsum("bhij,bjhd->bihd", S.softmax(-1), v)

    @contextmanager
    def sdpa_kernel(backends):
        calls.append(backends[0].name)
        yield

    monkeypatch.setattr(model_module, "sdpa_kernel", sdpa_kernel)
    monkeypatch.setitem(sys.modules, "flash_attn", Namespace(flash_attn_func=flash_attn_func))
    return calls


def map_and_route(attn, kernel, T, dtype=torch.float64, device="cpu", spread=3.0, **size):
    """A layer's output, and its gradients of x and of all parameters, in float64 by the map, and in dtype by a kernel;
    bfloat16 as in training, float32 under autocast."""
    found, layer = [], layer_of(attn, spread=spread, **size)
    stored = torch.promote_types(dtype, torch.float32)
    layer.to(stored)  # so that both begin with the same numbers
    x, weight = (random(2, T, size.get("n_embd", 32), seed=s).to(device, stored) for s in (0, 1))
    for layer.flash, now in ((False, torch.float64), (True, stored)):
        layer.to(device, now).kernel = kernel
        inputs = [x.to(now).requires_grad_(), *layer.parameters()]
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == torch.bfloat16 and layer.flash):
            y = layer(inputs[0])
        found.append([y.detach(), *torch.autograd.grad((y * weight).sum(), inputs)])
    return [relative(a, b) for a, b in zip(found[1], found[0])]


def check_precision(attn, kernel, dtype, device, decay):
    """Output and gradients against float64, bf16 under 2e-2 (3e-2 with decay) and float32 under 1e-3. The subtraction
    costs digits: diff in bf16 is at most 2 sqrt(1 + lambda^2) / (1 - lambda) times as far off as softmax."""
    how = dict(T=200, dtype=dtype, device=device, spread=0.3, n_embd=256, block_size=256, decay=decay)  # heads of 64
    errors = map_and_route(attn, kernel, **how)
    assert max(errors) < {torch.bfloat16: 3e-2 if decay else 2e-2, torch.float32: 1e-3}[dtype]
    if attn == "diff" and dtype == torch.bfloat16:  # lambda is 0.36
        assert max(errors) < 3.3 * max(map_and_route("softmax", kernel, **how))


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("attn", ALL)
def test_precision_of_the_fast_form(attn, dtype, decay):
    check_precision(attn, "sdpa", dtype, "cpu", decay)


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("attn", ["softmax", "diff"])
def test_routes_equal_the_map(attn, kernel, decay, monkeypatch):
    """What each route does to q, k, v and the mask, in float64: the kernels by their CPU twins."""
    calls = fake_kernels(monkeypatch)
    for T in (2, 70):
        bound = 1e-6 if kernel == "flash_attn" and decay else 1e-10  # its slopes are float32
        assert max(map_and_route(attn, kernel, T, decay=decay)) < bound
    halves = 2 if attn == "diff" else 1
    expected = dict(sdpa=["FLASH_ATTENTION"] * 2, cudnn=["CUDNN_ATTENTION"] * 2, efficient=["EFFICIENT_ATTENTION"] * 2)
    assert calls == expected.get(kernel, ["flash_attn"] * 2 * halves)


def test_a_kernel_that_cannot_run_or_is_wrong_is_an_error(monkeypatch):
    model = tiny("diff", decay=True)
    assert pick_kernel(model) == ("sdpa", "") and pick_kernel(model, "sdpa", torch.bfloat16) == ("sdpa", "")
    for name in ("cudnn", "efficient", "flash_attn"):
        with pytest.raises(ValueError, match=f"{name} can't run here: needs a CUDA device"):
            pick_kernel(model, name)
    for other in (tiny("linear"), tiny("diff", flash=False)):
        assert pick_kernel(other) == (None, "")
        with pytest.raises(ValueError, match="sdpa would not be used"):
            pick_kernel(other, "sdpa")
    right = model_module.sdpa
    monkeypatch.setattr(model_module, "sdpa", lambda q, k, v, rate, kernel: right(q, k, v, None, kernel))  # no decay
    with pytest.raises(ValueError, match="its result differs from the map's"):
        pick_kernel(model)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@cuda
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("attn", ALL)
def test_cuda_routes_equal_the_map(attn, dtype, kernel, decay):
    torch.set_float32_matmul_precision("highest")
    try:
        pick_kernel(tiny(attn, n_embd=256, decay=decay).cuda(), kernel if attn not in LINEAR else "auto", dtype)
    except ValueError as e:
        pytest.skip(str(e))
    check_precision(attn, kernel, dtype, "cuda", decay)


@cuda
@pytest.mark.parametrize("attn", ALL)
def test_cuda_compiled_equals_eager(attn):
    """A training step, which changes every parameter, and the steps of the sampler as CUDA graphs."""
    torch._dynamo.reset()
    model, losses = tiny(attn, n_embd=256, block_size=16, decay=True).cuda(), []
    idx = tokens(2, 129).cuda()
    step = torch.compile(model.step, mode="reduce-overhead", fullgraph=True)
    eager, compiled = (torch.stack(list(model.generate(idx[:, :7], 40, temperature=0, step=s))) for s in (None, step))
    assert (eager == compiled).float().mean() > 0.9  # another order of sums may turn a near tie
    pick_kernel(model, "auto", torch.bfloat16)
    for run in (model, torch.compile(model, fullgraph=True)):
        with torch.autocast("cuda", torch.bfloat16):
            losses.append(run(idx[:, :-1], idx[:, 1:])[1])
    assert losses[1].item() == pytest.approx(losses[0].item(), abs=2e-2)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses[1].backward()
    torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True).step()
    assert not any(torch.equal(p, before[n]) or not p.isfinite().all() for n, p in model.named_parameters())


# ---- README.md


def test_the_readme_quotes_the_code_and_its_flags_exist(tmp_path, monkeypatch, capsys):
    """Quoted lines stand in model.py, the fifth arm trains, and every flag of every command is one of its program."""
    readme, code = (HERE / "README.md").read_text(), (HERE / "model.py").read_text()
    *quoted, fifth = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    for part in "\n\n".join(quoted).split("\n\n"):
        assert part.rstrip() in code or textwrap.indent(part.rstrip(), "    ") in code
    monkeypatch.chdir(tmp_path)
    exec(fifth.replace("--steps=20", "--steps=2 --eval_tokens=256".replace(" ", '", "')), {})
    assert ATTENTION.pop("qknorm") and Path("out/qknorm/ckpt.pt").exists()
    programs = {"train.py": train, "sample.py": sample, "bench.py": bench, "prepare_fineweb.py": prepare_fineweb,
                "experiments.recall": recall, "experiments.ablations": ablations}  # fmt: skip
    for name, flags in re.findall(r"^    .*?([\w.]+\.py|experiments\.\w+)\b([^#&\n]*)", readme, re.MULTILINE):
        if name in programs:
            verb = ["loss"] if name == "bench.py" else []
            with pytest.raises(SystemExit):
                programs[name].main([*verb, "--help"])
            assert set(re.findall(r"--\w+", flags)) <= set(re.findall(r"--\w+", capsys.readouterr().out))


# ---- bench.py and experiments

MINI = [f"--{key}={value}" for key, value in dict(n_layer=1, n_head=4, n_embd=32, block_size=32, batch_size=2,
        total_batch=64, steps=2, eval_tokens=256, device="cpu").items()]  # fmt: skip


def measured(verb, *flags, out="."):
    """The rows of the tables that a verb wrote. The other two forms are there."""
    bench.main([verb, f"--out={out}", *flags])
    assert Path(out, f"{verb}.png").stat().st_size > 1000 and Path(out, f"{verb}.md").read_text().count("|") > 10
    return list(json.loads(Path(out, f"{verb}.json").read_text())["tables"].values())


def fake_run(folder, attn, seed, loss, steps=100, reached=100, **more):
    head = dict(attn=attn, seed=seed, steps=steps, n_head=4, lr=1e-3) | more
    rows = [head, dict(step=reached // 2, tokens=500 * reached, val_loss=loss + 1)]
    rows.append(dict(step=reached, tokens=1000 * reached, val_loss=loss, tok_per_s=100.0))
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_bench_loss_by_hand(tmp_path, capsys):
    for seed, softmax, diff in ((1, 2.0, 2.5), (2, 3.0, 3.3)):
        fake_run(tmp_path / f"a{seed}", "softmax", seed, softmax)
        fake_run(tmp_path / f"b{seed}", "diff", seed, diff)
        fake_run(tmp_path / f"c{seed}", "linear", seed, 2.5, reached=100 if seed == 1 else 60)
        fake_run(tmp_path / f"decay{seed}", "softmax", seed, 1.0, decay=True)
    fake_run(tmp_path / "half", "softmax", 1, 9.0, n_head=2)
    fake_run(tmp_path / "e2", "diff", 2, 0.1, lr=0.00400000001)  # best of all, but one seed of two
    table, best, others = measured("loss", str(tmp_path), out=tmp_path / "bench")
    rows = {row["attn"]: row for row in table}
    # softmax: 2 and 3; diff - softmax: 0.5 and 0.3, not compared with half the heads or another mask
    plain = rows["softmax n_head4 nodecay lr1e-3"]
    assert plain["runs"] == "2 of 2" and plain["val loss"] == [2.5, pytest.approx(0.5**0.5)] and plain["tok/s"] == 100
    assert plain["− softmax"] == [None, None] and plain["tokens"] == 100_000
    assert rows["diff n_head4 nodecay lr1e-3"]["− softmax"] == pytest.approx([0.4, 0.1])
    linear = rows["linear n_head4 nodecay lr1e-3"]
    assert linear["runs"] == "1 of 2" and linear["− softmax"] == [0.5, None]
    assert len(rows) == 6 and {"softmax n_head4 decay lr1e-3", "diff n_head4 nodecay lr4.00000001e-3"} < rows.keys()
    (mine,) = (row for row in best if row["attn"] == "diff n_head4 nodecay")
    assert mine["rate"] == "0.001 (at the edge)" and mine["− softmax"] == pytest.approx([0.4, 0.1])
    said = {Path(row["run"]).name: row["status"] for row in others}
    assert said == {"c2": "stopped at step 60 of 100"}
    assert "| 0.400 ± 0.100 |" in capsys.readouterr().out


def test_loss_curves_show_what_differs(tmp_path):
    for name, final in (("softmax", 1.0), ("diff", 1.5)):
        fake_run(tmp_path / name, name, 1, final)
    _, evals, _ = bench.read_runs([tmp_path])
    axes = bench.loss_curves(evals).axes[0]
    bottom, top = axes.get_ylim()  # after a tenth the two are 0.5 apart
    assert 0.9 < bottom < 1 and 2 < top < 2.2 and axes.get_xscale() == "log"


def test_a_result_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch, capsys):
    import pandas as pd

    def publish(number):
        df = pd.DataFrame(dict(seed=["1"], attn=["diff"], x=[1], y=[number]))
        bench.publish(tmp_path, "x", dict(run=1), {"a table": df}, bench.plot(df, "x", "y"))

    def full(figure, *args, **how):
        raise OSError(28, "No space left on device")

    publish(1.5)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"x.md", "x.json", "x.png"}
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(OSError):
        publish(2.5)
    assert "| 2.5 |" in capsys.readouterr().out
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_bench_speed_and_decode(tmp_path, monkeypatch):
    monkeypatch.setitem(train.PRESETS, "toy", dict(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=2))
    flags = ["--preset=toy", "--device=cpu", "--repeats=1", "--T=16"]
    (rows,) = measured("speed", *flags, "--kernel=auto,cudnn", out=tmp_path)
    kernels = ["sdpa", "cudnn", "sdpa", "cudnn", "chunks", "chunks"]
    assert [row["kernel"] for row in rows] == kernels * 2  # attention alone, training step
    for row in rows:
        if row["kernel"] == "cudnn":
            assert "needs a CUDA device" in row["failed"] and row["fwd, tokens/s"] is None
        else:
            assert row["fwd + bwd, tokens/s"] > 0 and row["fwd, × row 1"][0] > 0 and row["failed"] is None
    earlier = (tmp_path / "speed.md").read_bytes()
    with pytest.raises(ValueError, match="nothing could be timed: .*needs a CUDA device"):
        bench.main(["speed", *flags, "--arms=softmax", "--kernel=cudnn", f"--out={tmp_path}"])
    assert (tmp_path / "speed.md").read_bytes() == earlier
    (rows,) = measured("decode", *flags, "--num_samples=1,3", out=tmp_path)
    state = {"linear": 32 * 16 + 32, "diff_linear": 2 * 32 * 16 + 32}  # S, twice as many features each; and Z
    for row in rows:
        assert row["bytes of state a sequence"] == 4 * state.get(row["attn"], 2 * 16 * 32)
        assert row["tokens/s"] > 0 and (row["× recomputing"] is None) == (row["sequences"] == 3)


def unigram(model, likely, by=3.0):
    """The model now says the same after every text: each byte of likely is exp(by) times as likely as any other."""
    with torch.no_grad():
        for block in model.blocks:
            block.attn.out_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        model.wte.weight.zero_()
        model.wte.weight[:, 0] = 10.0
        model.wte.weight[list(likely), 0] += by
        model.norm.weight.fill_(model.config.n_embd**-0.5)
    return model


OTHER = math.log(256 + math.exp(3.0))  # the loss of a byte that is not likely; a likely one has 3 less


def checkpoint(model, val, path="c.pt", **run):
    """A checkpoint in the working directory of a model of bytes, with a data set x.txt whose last tenth is val."""
    Path("x.txt").write_text("z" * (9 * len(val) - 1) + val)
    what = prepare_fineweb.load_data(Path("x.txt"))[3]
    model.save(path, tokenizer="bytes", step=1, run=what | dict(seed=1) | run)


def test_slices(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint(unigram(tiny("softmax", vocab_size=257, block_size=29), b"f"), "abcdefghijabcdefghij0123456789")
    ((row,),) = measured("slices", "--ckpt=c.pt")  # the hits are the second e f g h i j
    assert row["AR-hits"] == pytest.approx(OTHER - 3 / 6, abs=1e-4)
    assert row["all"] == pytest.approx(OTHER - 2 * 3 / 29, abs=1e-4)


def test_runs_that_differ_in_the_seed_alone_are_put_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, attn, by, seed in (("a", "softmax", 3.0, 1), ("b", "softmax", 1.0, 2), ("c", "diff", 3.0, 1)):
        model = unigram(tiny(attn, vocab_size=257, block_size=16), b"f", by)
        checkpoint(model, "a" * 33 + "f" * 17, f"{name}.pt", seed=seed)
    checkpoint(model, "a" * 33 + "f" * 17, "d.pt", subln_init=0.2)
    means, each = measured("slices", "--ckpt", "a.pt", "b.pt", "c.pt")
    assert [(row["attn"], row["seed"]) for row in each] == [("softmax", "1"), ("softmax", "2"), ("diff", "1")]
    a, b = each[0]["all"], each[1]["all"]
    assert a != b and means[0]["all"] == pytest.approx([(a + b) / 2, abs(a - b) / 2**0.5])
    assert means[1]["all"] == [pytest.approx(each[2]["all"]), None]
    (each,) = measured("slices", "--ckpt", "c.pt", "d.pt")
    assert [row["attn"] for row in each] == ["diff subln_init1", "diff subln_init0.2"]


@pytest.mark.parametrize("block", [7, 8])
def test_the_window_is_the_samplers(block, monkeypatch):
    model, text, losses = tiny("softmax", block_size=block), torch.randint(97, (1, 41), generator=seeded(0)), []

    def forced(logits, *how):
        t = len(losses)
        losses.append(F.cross_entropy(logits, text[:, t + 1]).item())
        return text[:, t + 1 : t + 2]

    monkeypatch.setattr(model_module, "next_token", forced)
    list(model.generate(text[:, :1], 40))
    assert bench.windowed_losses(model, text)[0].tolist() == pytest.approx(losses, abs=1e-5)


def test_position(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint(unigram(tiny("diff", vocab_size=257, block_size=16), b"f"), "a" * 33 + "f" * 17)
    between, upto = measured("position", "--ckpt=c.pt", "--length=48")
    assert [row["attn"] for row in upto] == ["diff", "diff, window"]
    for far, near in zip(upto, between):
        assert far["48"] == pytest.approx(OTHER - 1, abs=1e-4) and far["32"] == pytest.approx(OTHER, abs=1e-4)
        assert near["33 to 48"] == pytest.approx(OTHER - 3, abs=1e-4)


def test_outliers_that_were_planted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint(unigram(tiny("diff", vocab_size=257, block_size=29), b"f"), "abcdefghijabcdeXghij0123456789")

    def planted(layer, q, k, R):
        S = torch.full((len(q), 4, 29, 29), 0.5).tril() + torch.full((29, 29), 1e6).triu(1)
        S[:, 1, 5, 3] = -9
        return S

    monkeypatch.setattr(model_module.Softmax, "scores", planted)
    rows = {row.pop("of"): row for row in measured("outliers", "--ckpt=c.pt")[0]}
    assert [rows["scores, branch 1"][key] for key in ("top-1", "top-100")] == [0.5, 0.5]
    assert [rows["scores, branch 2"][f"top-{k}"] for k in (1, 2, 3, 10)] == [9, 9, 0.5, 0.5]  # two layers
    assert [rows["residual stream"][f"top-{k}"] for k in (1, 2, 3, 10)] == [13, 13, 10, 10]
    x = random(10, 999)
    row = bench.extremes_row([bench.extremes(part) for part in x])
    assert row["median"] == pytest.approx(x.abs().median().item(), rel=0.01)
    assert row["top-100"] == pytest.approx(x.abs().flatten().topk(100).values[-1].item())


def test_residual_norms_by_hand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = unigram(tiny("diff", vocab_size=257), b"")
    with torch.no_grad():  # embeddings of length 5, and blocks that add nothing
        model.wte.weight[:, :2] = torch.tensor([3.0, 4.0])
    checkpoint(model, "Once upon a time there was a text. " * 30)
    ((init, end),) = measured("residual", "--ckpt=c.pt", "--tokens=500")
    assert [end[k] for k in ("embedding", "block 0", "block 1")] == pytest.approx([5, 5, 5])
    assert init["embedding"] == pytest.approx(0.02 * 32**0.5, rel=0.2) and init["block 1"] > init["embedding"]


def test_quant(tmp_path, monkeypatch):
    S = torch.tensor([[1.0, 99.0], [-0.3, 0.52]]).expand(1, 2, 2, 2) * torch.tensor([1.0, 2.0]).view(1, 2, 1, 1)
    lower = lambda x: x[0, :, 1].flatten().tolist()
    assert lower(bench.absmax(S, 4, (2, 3))) == pytest.approx([-2 / 7, 4 / 7, -4 / 7, 8 / 7])  # 7 steps up to 1, to 2
    assert lower(bench.absmax(S, 3, (1, 2, 3))) == pytest.approx([0, 2 / 3, -2 / 3, 4 / 3])  # 3 steps up to 2
    monkeypatch.chdir(tmp_path)
    model = tiny("softmax", vocab_size=257, block_size=29)
    with torch.no_grad():
        for p in model.blocks.parameters():
            p.mul_(8)
    checkpoint(model, "abcdefghijabcdefghij0123456789")
    (exact,), (above,) = measured("quant", "--ckpt=c.pt")
    assert 0 < abs(above["8 bits"]) < abs(above["4 bits"]) == pytest.approx(abs(exact["4 bits"] - exact["exact"]))
    sevenths = lambda layer, q, k, R: torch.arange(8.0).div(7).repeat(4)[:29].expand(len(q), 4, 29, 29)
    monkeypatch.setattr(model_module.Softmax, "scores", sevenths)  # four bits hold these exactly
    assert measured("quant", "--ckpt=c.pt")[1][0]["4 bits"] == pytest.approx(0, abs=1e-6)


def test_hellaswag(tmp_path, monkeypatch):
    endings = ["qqqqq", "ffff", "q", "qqqqqqq"]  # f is likely: smallest mean loss; the q, being short: smallest sum
    rows = [dict(ctx="x", endings=endings, label=label) for label in ("1", "1", "2")]
    monkeypatch.chdir(tmp_path)
    Path("stories").mkdir()
    Path("stories/validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoint(unigram(tiny("diff", vocab_size=257), b"f", by=1.0), "a" * 40)
    ((row,),) = measured("hellaswag", "--ckpt=c.pt", "--source=stories")
    assert row["accuracy, normalised"] == pytest.approx(2 / 3) and row["accuracy"] == pytest.approx(1 / 3)
    assert row["standard error"] == pytest.approx((2 / 9 / 3) ** 0.5) and row["contexts cut"] == 0 and row["rows"] == 3


def test_maps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny("diff", vocab_size=257)
    checkpoint(model, "a" * 40)
    (rows,) = measured("maps", "--ckpt=c.pt", "--text=cat mat", "--layer=1")
    idx, block = torch.tensor([list(b"cat mat")]), model.blocks[0]
    assert torch.equal(bench.attention_maps(model, idx)[0], block.attn.map(block.norm1(model.wte(idx))))
    assert rows[0]["sum of a row"] == pytest.approx(1 - block.attn.lambda_full().item(), abs=1e-4)


def test_ablations_are_the_rows_of_table_6(tmp_path):
    assert ablations.main(["--seed=1", *MINI, f"--out={tmp_path}"])
    rows = json.loads((tmp_path / "ablations.json").read_text())["tables"].popitem()[1]
    assert [f"{r['heads']} {r['d']} {r['norm']}" for r in rows] == [
        "4 8 no", "2 16 no", "2 16 yes", "2 8 yes", "2 8 no", "2 8 yes", "2 8 yes"]  # fmt: skip
    assert len({r["val loss"][0] for r in rows}) == 7 and rows[0]["− row 1"] == [None, None]
    heads = [train.read_log(tmp_path / f"row{i}-seed1/log.jsonl")[0] for i in range(1, 8)]
    assert [head["lambda_init"] for head in heads] == [None] * 5 + [0.8, 0.5]
    for flag in ("--lambda_init=0.1", "--subln", "--subln_init=0.2", "--lr=1e-3,2e-3"):
        with pytest.raises(ValueError, match="leave it out"):
            ablations.main(["--seed=1", *MINI, flag, f"--out={tmp_path / 'other'}"])
    assert ablations.main(["--seed=1", *MINI, "--lr=1e30", "--grad_clip=1e30", f"--out={tmp_path / 'wild'}"]) is False
    assert "Not in these figures" in (tmp_path / "wild/ablations.md").read_text()


def test_recall_texts():
    for N, R, depth in ((1, 1, 0.0), (4, 2, 0.5), (8, 8, None), (3, 1, 1.0)):
        text, place = recall.make_texts(seeded(N), 50, 40, N, R, depth)
        for row, begins in zip(text.tolist(), place.tolist()):
            held = {row[p]: row[p + 1] for p in begins}
            asked = row[40 - 2 * R :: 2]
            assert len(held) == N and len(set(asked)) == R and max(held) < recall.KEYS  # different keys
            assert [held[key] for key in asked] == row[41 - 2 * R :: 2] and asked[0] == row[begins[0]]
            assert sum(token >= recall.KEYS + recall.VALUES for token in row) == 40 - 2 * R - 2 * N  # fillers


def test_recall(tmp_path):
    """Queries of zero attend evenly to the 31 tokens before the answer: 2 of them are the answer's, 28 noise."""
    model = tiny("diff", vocab_size=64)
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn.q_proj.weight)
    assert recall.attention_shares(model, 20, "cpu", 32, 4, 0.5) == pytest.approx((2 / 31, 28 / 31), abs=1e-5)
    recall.main(["--seeds=1", "--steps=4", "--texts=2", "--procs=1", "--decay", f"--out={tmp_path}"])
    found = json.loads((tmp_path / "recall.json").read_text())
    (rows,) = found["tables"].values()
    assert [row["attn"] for row in rows] == ALL and found["about"]["decay"] is True
    assert rows[1]["on the noise"][0] == pytest.approx(recall.run(("diff", 0, 4, True, 2, "cpu"))["on the noise"])


# ---- bad input: a clear message, an exit code, no traceback


@pytest.mark.parametrize(
    "program,flags,says",
    [
        (train, ["--attn=softmax,cosine"], "cosine"),
        (train, ["--seed=1,x"], "--seed"),
        (train, ["--lr=-1"], "learning rate"),
        (train, ["--attn=softmax,diff", "--n_head=1"], "n_head must be even for diff"),
        (train, ["--total_batch=3000"], "multiple of 256"),
        (train, ["--data=short.txt"], "too short"),
        (train, ["--data=foreign"], "not a token shard"),
        (train, ["--data=cut"], "is cut"),
        (train, ["--data=beyond"], "token 300"),
        (train, ["--preset=gpt2"], "prepare_fineweb.py"),
        (train, ["--out=short.txt/x"], "short.txt"),
        (train, ["--kernel=cudnn"], "needs a CUDA device"),
        (train, ["--kernel=sdpa", "--attn=linear"], "would not be used"),
        (train, ["--device=tpu9"], "tpu9"),
        (sample, [], "train.py"),
        (sample, ["--ckpt=short.txt"], "short.txt"),
        (sample, ["--ckpt=nameless.pt"], "tokenizer"),
        (sample, ["--max_new_tokens=0"], "--max_new_tokens"),
        (bench, ["slices", "--ckpt=nowhere.pt"], "nowhere.pt"),
    ],
)
def test_bad_input_is_said_clearly(program, flags, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("too short")
    tiny("softmax").save("nameless.pt")
    header = np.array([20240520, 1, 9000] + [0] * 253, "<i4").tobytes()
    beyond = header + np.full(9000, 300, "<u2").tobytes()
    for folder, content in (("foreign", b"x\xff" * 2500), ("cut", header + bytes(9000)), ("beyond", beyond)):
        Path(folder).mkdir()
        for split in ("train", "val"):
            (Path(folder) / f"x_{split}_000000.bin").write_bytes(content)
        (Path(folder) / "manifest.json").write_text('{"tokenizer": "bytes", "shards": []}')
    there = set(os.listdir())
    with pytest.raises((SystemExit, ValueError, OSError)) as e:
        program.main(flags)
    said = capsys.readouterr().err + str(e.value)
    assert says in said and str(e.value) != "0" and "\n" not in str(e.value) and set(os.listdir()) - {"out"} == there


def run(*command, cwd, **kwargs):
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, **kwargs)


def test_the_programs_as_a_user_starts_them(tmp_path):
    wrong = run(HERE / "train.py", "--data=nowhere", cwd=tmp_path)
    assert wrong.returncode == 1 and wrong.stderr.count("\n") == 1 and wrong.stderr.startswith("train.py: ")
    demo = run(HERE / "model.py", cwd=tmp_path)
    assert demo.returncode == 0 and all(attn in demo.stdout for attn in ALL) and len(demo.stdout.splitlines()) < 25
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_toy_runs_learn(tmp_path):
    """The preset as it is, on Python's manual, two arms at once on a core each."""
    command, env = [sys.executable, HERE / "train.py", "--device=cpu"], os.environ | {"OMP_NUM_THREADS": "1"}
    runs = [subprocess.Popen([*command, f"--attn={attn}"], cwd=tmp_path, env=env) for attn in ("softmax", "diff")]
    assert [run.wait() for run in runs] == [0, 0]
    for attn, bound in (("softmax", 1.7), ("diff", 1.9)):
        last = train.read_log(tmp_path / "out" / attn / "log.jsonl")[1][-1]
        assert last["step"] == 500 and last["val_loss"] < bound
