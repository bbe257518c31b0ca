"""
All the tests, in the order of the README.

    pytest test_model.py            # under 3 minutes on two CPU cores
    pytest test_model.py -m slow    # the long ones
"""
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import model as model_module
import sample
import train
from model import ATTENTION, GPT, GPTConfig, next_token, phi, rotary, rotate
from prepare_fineweb import EOT, Shards, get_tokenizer

HERE = Path(__file__).parent
torch.set_num_threads(1)  # on tensors this small, threads only wait for one another
ALL, DIFF, LINEAR = list(ATTENTION), ["diff", "diff_linear"], ["linear", "diff_linear"]
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


def steps(layer, x):
    """layer(x), one token at a time: the first as a prefill of one, the rest as steps."""
    state = {}
    return torch.cat([layer(x[:, t : t + 1], state=state) for t in range(x.shape[1])], 1)


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


# ---- one idea, three forms


@pytest.mark.parametrize("rope_theta", [10000.0, 0.0])
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("attn", ALL)
def test_three_forms_agree(attn, T, rope_theta):
    layer = layer_of(attn, block_size=256, rope_theta=rope_theta)
    x = random(2, T, 32)
    fast = layer(x)
    layer.flash = False
    assert (layer(x) - fast).abs().max() < 1e-10
    with torch.no_grad():
        assert (steps(layer, x) - fast).abs().max() < 1e-10


@pytest.mark.parametrize("attn", ALL)
def test_prefill_then_steps(attn):
    layer, x, state = layer_of(attn, block_size=256), random(2, 150, 32), {}
    with torch.no_grad():
        out = [layer(x[:, :130], state=state)]
        for t in range(130, 150):
            out.append(layer(x[:, t : t + 1], state=state))
        assert (torch.cat(out, 1) - layer(x)).abs().max() < 1e-10


@pytest.mark.parametrize("T", [2, 65, 130])
@pytest.mark.parametrize("attn", ALL)
def test_gradients_of_map_and_fast_agree(attn, T):
    layer = layer_of(attn, block_size=256)
    inputs = [random(2, T, 32).requires_grad_(), *layer.parameters()]
    assert len(inputs) == (10 if attn in DIFF else 5)  # x, four projections; four lambda vectors and the norm
    weight, grads = random(2, T, 32, seed=1), []
    for layer.flash in (True, False):
        grads.append(torch.autograd.grad((layer(inputs[0]) * weight).sum(), inputs))
    for a, b in zip(*grads):
        assert a.abs().max() > 1e-6
        assert (a - b).abs().max() < 1e-10 * max(1, b.abs().max())


def equations(layer, x):
    """layer(x) and its map, one entry at a time from the papers' equations, with none of model.py's code."""
    (B, T, C), d, H = x.shape, layer.d, layer.n_head
    diff, linear = hasattr(layer, "lambda_q1"), isinstance(layer, model_module.LinearAttention)
    q, k, v = ((x @ p.weight.T).numpy(force=True) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    R = np.zeros((T, d, d))  # RoFormer, Eq. 15
    for m in range(T):
        for i in range(d // 2):
            a = m * layer.rope_theta ** (-2 * i / d)
            R[m, 2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]]
    elu1 = lambda u: np.where(u > 0, u + 1, np.exp(np.minimum(u, 0)))
    maps = np.zeros((B, H, T, T))
    for b in range(B):
        for h in range(H):
            qh, kh = q[b, :, h * d : (h + 1) * d], k[b, :, h * d : (h + 1) * d]
            for i in range(T):
                if linear:
                    fq, fk = elu1(qh[i]), elu1(kh[: i + 1])
                    maps[b, h, i, : i + 1] = [(R[i] @ fq) @ (R[j] @ fk[j]) / (fq @ fk.sum(0)) for j in range(i + 1)]
                else:
                    e = np.exp([(R[i] @ qh[i]) @ (R[j] @ kh[j]) / math.sqrt(d) for j in range(i + 1)])
                    maps[b, h, i, : i + 1] = e / e.sum()
    if diff:
        l1, l2 = ([getattr(layer, f"lambda_{n}{i}").numpy(force=True) for n in "qk"] for i in (1, 2))
        lam = math.exp(l1[0] @ l1[1]) - math.exp(l2[0] @ l2[1]) + layer.lambda_init
        maps = np.stack([maps[:, 2 * h] - lam * maps[:, 2 * h + 1] for h in range(H // 2)], 1)
    dv, heads = C // maps.shape[1], []
    for h in range(maps.shape[1]):
        y = maps[:, h] @ v[:, :, h * dv : (h + 1) * dv]
        if layer.subln is not None:
            y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * layer.subln.weight.numpy(force=True)
            y = y * (1 - layer.lambda_init) if diff else y
        heads.append(y)
    return np.concatenate(heads, -1) @ layer.out_proj.weight.numpy(force=True).T, maps


@pytest.mark.parametrize("subln", [True, False])
@pytest.mark.parametrize("attn", ALL)
def test_the_papers_equations(attn, subln):
    layer, x = layer_of(attn, subln=subln), random(2, 13, 32)
    y, A = equations(layer, x)
    assert abs(layer.map(x).numpy(force=True) - A).max() < 1e-12
    assert abs(layer(x).numpy(force=True) - y).max() < 1e-12


def test_fold_of_diff_linear():
    """Two linear maps, subtracted, are one with twice the features."""
    q1, q2, k1, k2, v, lam = *(phi(random(50, 8, seed=i)) for i in range(4)), random(50, 16, seed=9), 0.7
    A1, A2 = (q1 @ k1.T).tril(), (q2 @ k2.T).tril()
    z1, z2 = A1.sum(-1, keepdim=True), A2.sum(-1, keepdim=True)
    folded = (torch.cat((q1 / z1, -lam * q2 / z2), -1) @ torch.cat((k1, k2), -1).T).tril() @ v
    assert torch.allclose(folded, (A1 / z1 - lam * A2 / z2) @ v, rtol=0, atol=1e-12)


def test_lambda():
    model = tiny("diff", n_layer=4)
    assert [round(b.attn.lambda_init, 4) for b in model.blocks] == [0.2, 0.3555, 0.4707, 0.5561]  # Eq. 3, l from 0
    assert [b.attn.lambda_init for b in tiny("diff", lambda_init=0.5).blocks] == [0.5, 0.5]
    layer = model.blocks[1].attn
    for vector, value in zip((layer.lambda_q1, layer.lambda_k1, layer.lambda_q2, layer.lambda_k2), (0.1, 0.2, 0.3, 0.4)):
        torch.nn.init.constant_(vector, value)
    d = TINY["n_embd"] // TINY["n_head"]
    assert layer.lambda_full().item() == pytest.approx(math.exp(d * 0.02) - math.exp(d * 0.12) + 0.3555, abs=1e-4)


@pytest.mark.parametrize("attn", DIFF)
def test_heads_are_paired_with_their_neighbours(attn):
    """Heads 2h and 2h + 1 are one differential head. With lambda = 1, equal neighbours cancel; equal halves don't."""
    layer = layer_of(attn, lambda_init=1.0, subln=False)
    for name in ("lambda_q1", "lambda_q2"):
        torch.nn.init.zeros_(getattr(layer, name))
    x, rows = random(1, 9, 32), layer.q_proj.weight.shape[0] // 4
    blocks = lambda p: list(p.weight.detach().clone().split(rows))
    q, k = blocks(layer.q_proj), blocks(layer.k_proj)
    for order, vanishes in (((0, 0, 2, 2), True), ((0, 1, 0, 1), False)):
        with torch.no_grad():
            layer.q_proj.weight.copy_(torch.cat([q[i] for i in order]))
            layer.k_proj.weight.copy_(torch.cat([k[i] for i in order]))
        assert (layer.map(x).abs().max() < 1e-12) == vanishes


@pytest.mark.parametrize("attn,plain", [("diff", "softmax"), ("diff_linear", "linear")])
def test_without_lambda_a_differential_layer_is_its_even_heads(attn, plain):
    layer = layer_of(attn, lambda_init=0.0, subln=False)
    one, x = layer_of(plain), random(2, 20, 32)
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
        torch.nn.init.zeros_(getattr(layer, name))
    A = one.map(x)[:, 0::2]
    assert torch.allclose(layer.map(x), A, rtol=0, atol=1e-12)
    v = layer.v_proj(x).unflatten(-1, (2, 16)).transpose(1, 2)
    assert torch.allclose(layer(x), layer.out_proj((A @ v).transpose(1, 2).flatten(2)), rtol=0, atol=1e-12)


def test_sums_of_rows():
    x = random(2, 30, 32)
    assert torch.allclose(layer_of("softmax").map(x).sum(-1), torch.ones(2, 4, 30).double())
    layer = layer_of("diff")
    A = layer.map(x)
    assert torch.allclose(A.sum(-1), (1 - layer.lambda_full()).expand(2, 2, 30))
    assert A.min() < -0.01  # signed: nothing clips or normalises it
    unrotated = layer_of("linear", rope_theta=0.0)
    assert torch.allclose(unrotated.map(x).sum(-1), torch.ones(2, 4, 30).double())


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("attn", ALL)
def test_no_arm_looks_ahead(attn, flash):
    model, idx = tiny(attn, flash=flash).double(), torch.randint(97, (1, 80), generator=seeded(0))
    before, _ = model(idx, idx)
    for t in (0, 1, 40, 63, 64, 79):
        changed = idx.clone()
        changed[0, t] = (idx[0, t] + 1) % 97
        after, _ = model(changed, idx)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t], before[:, t])


@pytest.mark.parametrize("attn", ALL)
def test_scores_depend_on_distance_only(attn):
    layer = layer_of(attn)
    q, k = (random(1, 4, 1, 8, seed=s).expand(-1, -1, 20, -1) for s in (1, 2))
    S = layer.scores(q, k)
    assert torch.allclose(S[..., 1:, 1:], S[..., :-1, :-1], rtol=0, atol=1e-12)
    assert not torch.allclose(S[..., 1:], S[..., :-1], atol=1e-3)


def test_scores_is_the_seam():
    """What a measurement puts in the place of scores reaches the map and, with flash off, the output."""
    for attn in ALL:
        layer, x = layer_of(attn, flash=False), random(1, 10, 32)
        q, k, _ = layer.project(x)
        S, y, A = layer.scores(q, k), layer(x), layer.map(x)
        assert S.shape == (1, 4, 10, 10)
        layer.scores = lambda q, k: 0 * S
        assert not torch.allclose(layer.map(x), A, atol=1e-3) and not torch.allclose(layer(x), y, atol=1e-6)


def test_rotation_is_exact_far_away():
    """Turning by 10,000,019 - 10,000,000 is turning by 19, in float32 too."""
    q, k = random(1, 1, 1, 64).float(), random(1, 1, 1, 64, seed=1).float()
    near, far = ([rotate(x, rotary(torch.tensor([p]), 64, 1e4)) for x, p in ((q, a), (k, b))]
                 for a, b in ((19, 0), (10_000_019, 10_000_000)))  # fmt: skip
    assert abs((near[0] * near[1]).sum() - (far[0] * far[1]).sum()) < 1e-4


# ---- numerics that bite


def test_phi_and_its_gradient():
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.tensor([-20.0, -7.5, 0.0, 2.0], dtype=dtype, requires_grad=True)
        (slope,) = torch.autograd.grad(phi(x).sum(), x)
        expected = [math.exp(-20), math.exp(-7.5), 1, 3]
        assert phi(x).tolist() == pytest.approx(expected, rel=1e-2 if dtype == torch.bfloat16 else 1e-12)
        assert slope.tolist() == pytest.approx(expected[:3] + [1], rel=1e-2 if dtype == torch.bfloat16 else 1e-12)
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    assert torch.allclose(phi(x), F.elu(x) + 1)


@pytest.mark.parametrize("form", ["map", "fast", "step"])
@pytest.mark.parametrize("attn", ALL)
def test_bf16_autocast(attn, form):
    """Each form under autocast, against float64: 2e-2, times (1 + lambda)/(1 - lambda) where maps are subtracted."""
    model = tiny(attn, block_size=256)
    for block in model.blocks:
        layer, x = block.attn, random(2, 200, 32)
        lam = layer.lambda_full().item() if attn in DIFF else 0
        assert 0 <= lam < 1
        with torch.no_grad():
            expected = layer.double()(x)
            layer.float().flash = form == "fast"
            with torch.autocast("cpu", torch.bfloat16):
                y = steps(layer, x.float()) if form == "step" else layer(x.float())
        assert 1e-6 < relative(y, expected) < 2e-2 * (1 + lam) / (1 - lam)


@pytest.mark.parametrize("attn", ALL)
def test_bf16_weights(attn):
    """Everything in bf16, without autocast, runs and is near."""
    model, idx = tiny(attn), torch.randint(97, (2, 70), generator=seeded(0))
    with torch.no_grad():
        loss = model(idx, idx)[1]
        model.bfloat16()
        assert abs(model(idx, idx)[1] - loss) < 2e-2
        assert len(list(model.generate(idx[:, :5], 8))) == 8


def test_long_sums_stay_in_float32():
    """Under autocast a sum of 8,192 bf16 features is right; a plain bf16 sum is not."""
    k = phi(torch.randn(8192, generator=seeded(0))).bfloat16()
    plain = torch.zeros((), dtype=torch.bfloat16)
    for x in k:
        plain += x
    assert abs(plain - k.double().sum()) > 1000
    layer, x = layer_of("linear", dtype=torch.float32), random(1, 8192, 32).float()
    state, exact = {}, {}
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            layer(x, state=state)
        layer.double()(x.double(), state=exact)
    for name in ("S", "Z"):
        assert state[name].dtype == torch.float32
        assert relative(state[name], exact[name]) < 5e-3


# ---- the model around them


@pytest.mark.parametrize(
    "wrong,names",
    [
        (dict(attn="cosine"), "attn"),
        (dict(attn=["diff"]), "attn"),
        (dict(n_embd=30), "n_embd"),
        (dict(n_embd=36, n_head=4), "even"),
        (dict(attn="diff", n_head=1), "n_head"),
        (dict(attn="diff_linear", n_head=3, n_embd=48), "n_head"),
        (dict(n_layer=0), "n_layer"),
        (dict(block_size=-1), "block_size"),
        (dict(vocab_size=2.5), "vocab_size"),
        (dict(n_head=True), "n_head"),
        (dict(n_embd=2, n_head=1), "n_embd"),
        (dict(rope_theta=-1.0), "rope_theta"),
        (dict(rope_theta=float("nan")), "rope_theta"),
        (dict(lambda_init=float("inf")), "lambda_init"),
        (dict(lambda_init="0.8"), "lambda_init"),
        (dict(subln="yes"), "subln"),
        (dict(flash=None), "flash"),
    ],
)
def test_impossible_models_are_refused(wrong, names):
    with pytest.raises(ValueError, match=names):
        GPTConfig(**TINY | wrong)


def test_parameters_are_equal_but_for_lambda_and_norm():
    sizes = {attn: sum(p.numel() for p in tiny(attn).parameters()) for attn in ALL}
    d, layers = 8, 2
    assert sizes["linear"] == sizes["softmax"]
    assert sizes["diff"] == sizes["diff_linear"] == sizes["softmax"] + layers * (4 * d + 2 * d)
    names = {n.removeprefix("blocks.0.attn.") for n, _ in tiny("diff").named_parameters() if n.startswith("blocks.0.attn")}
    assert names == {"q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight", "subln.weight",
                     "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"}  # fmt: skip
    small = GPT(GPTConfig(attn="softmax"))  # GPT-2 small
    assert sum(p.numel() for p in small.parameters()) == 50304 * 768 + 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768
    assert small.flops_per_token(1024) == 6 * sum(p.numel() for p in small.parameters()) + 12 * 12 * 768 * 1024


def test_flops_are_the_softmax_models():
    assert len({tiny(attn).flops_per_token(64) for attn in ALL}) == 1


def digest(model, names):
    return {name: p.detach().numpy().tobytes() for name, p in model.named_parameters() if name in names}


def test_shared_parameters_are_the_same_bits():
    models = {attn: tiny(attn) for attn in ALL}
    shared = set.intersection(*({n for n, _ in m.named_parameters()} for m in models.values()))
    assert len(shared) == 2 + 2 * 9
    assert all(digest(m, shared) == digest(models["softmax"], shared) for m in models.values())
    pair = {n for n, _ in models["diff"].named_parameters()}
    assert digest(models["diff"], pair) == digest(models["diff_linear"], pair)
    other = tiny("softmax", seed=2)
    assert all(not torch.equal(p, q) or "norm" in n for (n, p), q in zip(other.named_parameters(), models["softmax"].parameters()))
    # and in another process, whatever the global generator was doing
    code = (
        "import hashlib, torch; torch.manual_seed(3); torch.randn(7); from model import *\n"
        f"m = GPT(GPTConfig(attn='diff_linear', **{TINY}))\n"
        "print(hashlib.sha256(b''.join(p.detach().numpy().tobytes() for p in m.parameters())).hexdigest())"
    )
    import hashlib

    here = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in models["diff_linear"].parameters())).hexdigest()
    there = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert there.stdout.strip() == here, there.stderr


def test_init_has_the_stated_spread():
    model = GPT(GPTConfig(attn="diff", n_layer=3, n_head=8, n_embd=256, vocab_size=512))
    for name, p in model.named_parameters():
        end = "out_proj" in name or "down_proj" in name
        std = 0.1 if "lambda" in name else 0.02 / 6**0.5 if end else 0.02
        if "norm" in name or "subln" in name:
            assert torch.equal(p, torch.ones_like(p))
        else:
            assert p.std().item() == pytest.approx(std, rel=0.3 if p.numel() < 100 else 0.03)


@pytest.mark.parametrize("attn", ALL)
def test_first_loss_is_that_of_guessing(attn):
    model = GPT(GPTConfig(attn=attn, n_layer=4, n_head=4, n_embd=128, vocab_size=257, block_size=256))
    idx = torch.randint(257, (4, 257), generator=seeded(0))
    logits, loss = model(idx[:, :-1], idx[:, 1:])
    assert logits.shape == (4, 256, 257)
    assert loss.item() == pytest.approx(math.log(257), rel=0.03)
    last, nothing = model(idx[:, :-1])
    assert nothing is None and last.shape == (4, 1, 257)
    assert torch.allclose(last[:, 0], logits[:, -1], atol=1e-5)


@pytest.mark.parametrize("attn", ALL)
def test_compiles_to_one_graph_for_any_length(attn):
    torch._dynamo.reset()
    model = tiny(attn, n_layer=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for T in (65, 64):
        idx = torch.randint(97, (3, T), generator=seeded(T))
        loss = compiled(idx, idx)[1]
        loss.backward()
        assert loss.item() == pytest.approx(model(idx, idx)[1].item(), abs=1e-5)


@pytest.mark.parametrize("attn", ALL)
def test_overfits_one_batch(attn):
    torch.manual_seed(0)
    model, idx = tiny(attn), torch.randint(97, (4, 33), generator=seeded(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(200):
        _, loss = model(idx[:, :-1], idx[:, 1:])
        if loss < 0.1:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1


@pytest.mark.parametrize("attn", ALL)
def test_every_parameter_learns(attn):
    model, idx = tiny(attn), torch.randint(97, (2, 33), generator=seeded(0))
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0] == []


# ---- one token at a time


@pytest.mark.parametrize("prompt", [1, 7, 16, 40])
@pytest.mark.parametrize("attn", ALL)
def test_greedy_steps_equal_recomputation(attn, prompt):
    """Every token is the argmax of a full forward pass over what is kept, before and beyond block_size."""
    model = tiny(attn, block_size=16).double()
    with torch.no_grad():
        for p in model.blocks.parameters():
            p.mul_(8)  # so that the context speaks louder than the last token
    idx = torch.randint(97, (2, prompt), generator=seeded(1))
    made = torch.stack(list(model.generate(idx, 60, temperature=0)), 1)
    assert made.shape == (2, 60) and made.dtype == torch.int64 and not made.requires_grad
    kept = idx if attn in LINEAR else idx[:, -16:]
    refills = 0
    for t in range(60):
        if attn not in LINEAR and kept.shape[1] > 16:
            kept, refills = kept[:, -8:], refills + 1
        with torch.no_grad():
            logits, _ = model(kept)
        assert torch.equal(logits[:, -1].argmax(-1), made[:, t])
        kept = torch.cat((kept, made[:, t : t + 1]), 1)
    assert attn in LINEAR or refills >= 5
    assert len(set(made[0].tolist())) > 5  # not one token for ever


@pytest.mark.parametrize("attn", LINEAR)
def test_linear_state_has_one_size(attn):
    model, sizes = tiny(attn), set()
    state = [{} for _ in model.blocks]
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.int64), state=state)
        for _ in range(100):
            model(torch.zeros(1, 1, dtype=torch.int64), state=state)
            sizes.add(sum(t.numel() for s in state for t in s.values() if torch.is_tensor(t)))
    assert len(sizes) == 1


def test_a_full_cache_says_so():
    layer, state = layer_of("diff", block_size=4), {}
    layer(random(1, 3, 32), state=state)
    layer(random(1, 1, 32), state=state)
    with pytest.raises(ValueError, match="full"):
        layer(random(1, 1, 32), state=state)


def test_choices_follow_temperature_top_k_and_top_p():
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    logits, g = p.log()[:, [2, 0, 3, 1]].expand(20_000, -1), seeded(0)  # token 1 is likeliest, then 3, 0, 2
    share = lambda **how: torch.bincount(next_token(logits, **dict(temperature=1, top_k=None, top_p=None) | how, generator=g)[:, 0],
                                         minlength=4)[[1, 3, 0, 2]] / 20_000  # fmt: skip
    close = lambda a, b: torch.allclose(a, torch.tensor(b), atol=0.02)
    assert close(share(), [0.5, 0.3, 0.15, 0.05])
    assert close(share(temperature=0), [1.0, 0, 0, 0])
    assert close(share(temperature=0.5), (p[0] ** 2 / (p**2).sum()).tolist())
    assert close(share(top_k=2), [0.625, 0.375, 0, 0]) and close(share(top_k=99), [0.5, 0.3, 0.15, 0.05])
    assert close(share(top_p=0.79), [0.625, 0.375, 0, 0])  # the fewest that reach 0.79
    assert close(share(top_p=0.81), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0])
    assert close(share(top_p=1.0), [0.5, 0.3, 0.15, 0.05]) and close(share(top_p=1e-9), [1.0, 0, 0, 0])
    assert close(share(temperature=1e-4), [1.0, 0, 0, 0]) and close(share(temperature=1e-38), [1.0, 0, 0, 0])


def test_generate_is_repeatable_and_refuses_the_impossible():
    model, idx = tiny("diff"), torch.zeros(3, 4, dtype=torch.int64)
    once, again = (torch.stack(list(model.generate(idx, 20, generator=seeded(4)))) for _ in range(2))
    assert torch.equal(once, again) and len({tuple(row) for row in once.T.tolist()}) == 3
    assert max(max(row) for row in once.tolist()) < 97
    for wrong in (dict(temperature=-1), dict(temperature=float("nan")), dict(top_k=0), dict(top_p=0.0), dict(top_p=1.5)):
        with pytest.raises(ValueError):
            next(model.generate(idx, 1, **wrong))
    with pytest.raises(ValueError):
        next(model.generate(idx[:, :0], 1))


# ---- saving and loading


@pytest.mark.parametrize("attn", ALL)
def test_save_and_load(attn, tmp_path):
    model, idx = tiny(attn, subln=True, lambda_init=0.4), torch.randint(97, (1, 9), generator=seeded(0))
    model.save(tmp_path / "ckpt.pt", tokenizer="bytes", step=7, curve=torch.arange(3))
    loaded = GPT.load(tmp_path / "ckpt.pt", "cpu")
    assert loaded.config == model.config and torch.equal(loaded(idx)[0], model(idx)[0])
    assert loaded.extra["tokenizer"] == "bytes" and loaded.extra["step"] == 7 and loaded.extra["curve"].tolist() == [0, 1, 2]
    assert os.listdir(tmp_path) == ["ckpt.pt"]


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("boom",)


def test_load_refuses_what_is_not_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny("diff").save("good.pt")
    whole = Path("good.pt").read_bytes()
    bad = {"empty": b"", "cut": whole[: len(whole) // 2], "almost": whole[:-100], "text": b"hello" * 100,
           "bomb": pickle.dumps(Bomb(), 2)}  # fmt: skip
    for name, content in bad.items():
        Path(name).write_bytes(content)
    torch.save({"weights": torch.zeros(3)}, "foreign")
    torch.save([1, 2], "list")
    torch.save({"config": Bomb(), "model": {}}, "bomb2")
    torch.save({"config": dict(TINY, attn="diff"), "model": {"wte.weight": torch.zeros(3)}}, "misfit")
    torch.save({"config": dict(TINY, attn="quadratic"), "model": {}}, "unknown")
    for name in [*bad, "foreign", "list", "bomb2", "misfit", "unknown"]:
        with pytest.raises(ValueError, match=name) as e:
            GPT.load(name, "cpu")
        assert "\n" not in str(e.value)
    assert not Path("boom").exists()
    with pytest.raises(FileNotFoundError):
        GPT.load("nowhere.pt", "cpu")


def test_save_refuses_what_load_would_refuse(tmp_path):
    model = tiny("softmax")
    model.save(tmp_path / "ckpt.pt", step=1)
    with pytest.raises(pickle.UnpicklingError):
        model.save(tmp_path / "ckpt.pt", where=tmp_path)
    assert GPT.load(tmp_path / "ckpt.pt").extra["step"] == 1 and os.listdir(tmp_path) == ["ckpt.pt"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    model = tiny("softmax")
    model.save(tmp_path / "ckpt.pt", step=1)
    monkeypatch.setattr(torch, "save", lambda obj, f: (f.write(b"half"), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        model.save(tmp_path / "ckpt.pt", step=2)
    assert GPT.load(tmp_path / "ckpt.pt").extra["step"] == 1 and os.listdir(tmp_path) == ["ckpt.pt"]


# ---- data


def test_bytes_tokenizer():
    enc = get_tokenizer("bytes")
    text = f"Größe 🙂 ไทย \x00\n {EOT}"
    assert enc.encode_ordinary(text) == list(text.encode())
    assert enc.decode(enc.encode_ordinary(text)) == text
    assert (enc.n_vocab, enc.eot_token) == (257, 256)
    with pytest.raises(ValueError, match="gpt2 or bytes"):
        get_tokenizer("cl100k")


def test_sequences_cross_the_seams():
    tokens = np.arange(100, dtype="<u2")
    shards = Shards([tokens[:7], tokens[7:7], tokens[7:8], tokens[8:55], tokens[55:]])
    assert shards.tokens == 100 and shards.sequences(10) == 9 and shards.sequences(99) == 1 and shards.sequences(100) == 0
    for i in range(9):
        assert shards.sequence(i, 10).tolist() == list(range(10 * i, 10 * i + 11))
    with pytest.raises(IndexError):
        shards.sequence(9, 10)


# ---- training


def arguments(*flags):
    return train.parse(["--device=cpu", *flags])[1]


def test_every_sequence_is_seen_once_per_epoch():
    data = Shards([np.arange(1001, dtype="<u2") % 500])  # 100 sequences of 10
    args = arguments("--block_size=10", "--batch_size=2", "--total_batch=40", "--steps=50")
    for epoch in range(2):
        starts = []
        for step in range(25 * epoch, 25 * epoch + 25):
            for micro in range(2):
                x, y = train.batch(data, args, step, micro, 500)
                assert torch.equal(x[:, 1:], y[:, :-1]) and x.shape == (2, 10)
                starts += x[:, 0].tolist()
        assert sorted(starts) == sorted([10 * i % 500 for i in range(100)])
        assert starts != sorted(starts)
    big = arguments("--block_size=10", "--batch_size=4", "--total_batch=40", "--steps=50")  # any accumulation, same tokens
    assert torch.equal(train.batch(data, big, 30, 0, 500)[0],
                       torch.cat([train.batch(data, args, 30, m, 500)[0] for m in range(2)]))  # fmt: skip
    other = arguments("--block_size=10", "--batch_size=2", "--total_batch=40", "--steps=50", "--seed=2")
    assert not torch.equal(train.batch(data, other, 0, 0, 500)[0], train.batch(data, args, 0, 0, 500)[0])


def test_learning_rate():
    args = arguments("--steps=100", "--warmup=10", "--lr=1")
    rates = [train.learning_rate(s, args) for s in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1 and rates[99] == pytest.approx(1 / 90)
    assert np.allclose(np.diff(rates[10:]), -1 / 90)
    assert arguments("--steps=5").warmup == 4
    assert all(train.learning_rate(s, arguments("--steps=1")) > 0 for s in range(1))


def test_run_folder_names_what_differs():
    out = lambda *flags: str(arguments(*flags).out)
    assert out("--attn=diff") == "out/diff"
    assert out("--attn=diff", "--lr=2e-3", "--seed=1337", "--steps=9", "--log_every=1") == "out/diff"
    assert out("--attn=diff", "--no-subln", "--lr=3e-3", "--seed=2") == "out/diff-nosubln-lr3e-3-seed2"
    assert out("--lambda_init=0.5", "--n_layer=2", "--no-flash") == "out/softmax-n_layer2-noflash-lambda_init0.5"
    assert out("--out=here") == "here"


def test_presets():
    toy, gpt2 = arguments(), arguments("--preset=gpt2")
    assert (toy.n_layer, toy.n_head, toy.n_embd, toy.block_size, toy.batch_size, toy.steps) == (4, 4, 128, 256, 8, 500)
    assert (toy.total_batch, toy.lr, toy.warmup) == (2048, 2e-3, 50)
    assert (gpt2.n_layer, gpt2.n_head, gpt2.n_embd, gpt2.block_size) == (12, 12, 768, 1024)
    assert (gpt2.total_batch, gpt2.steps, gpt2.lr, gpt2.warmup) == (524288, math.ceil(2.8e9 / 524288), 1.5e-3, 375)
    assert arguments("--tokens=1e6").steps == math.ceil(1e6 / 2048)


SMALL = ["--device=cpu", "--n_layer=1", "--n_embd=32", "--n_head=2", "--block_size=32", "--batch_size=4", "--steps=6"]


def test_train_writes_a_run_and_sample_reads_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "Once upon a time there was a Größe 🙂. " * 200
    Path("any.txt").write_text(text, encoding="utf-8")
    train.main([*SMALL, "--attn=diff", "--data=any.txt", "--eval_every=4", "--log_every=2", "--out=out/x"])
    shown = capsys.readouterr().out
    assert "step     6/6" in shown and "Once upon a time" in shown
    head, *lines = [json.loads(line) for line in Path("out/x/log.jsonl").read_text().splitlines()]
    assert head["attn"] == "diff" and head["tokenizer"] == "bytes" and head["torch"] == torch.__version__
    assert [line["step"] for line in lines] == [0, 2, 4, 6]
    assert [line["tokens"] for line in lines] == [0, 2 * 128, 4 * 128, 6 * 128]
    assert {"train_loss", "lr", "grad_norm", "tok_per_s", "mfu"} <= lines[1].keys() and "val_loss" not in lines[1]
    for line in (lines[0], lines[2], lines[3]):
        assert line["val_loss"] > 0 and len(line["lambda"]) == 1 and line["sample"].startswith("Once upon a time")
    with pytest.raises(SystemExit) as e:  # nothing is overwritten unasked
        train.main([*SMALL, "--attn=diff", "--data=any.txt", "--out=out/x"])
    assert e.value.code == 1 and "--restart" in capsys.readouterr().err
    assert len(Path("out/x/log.jsonl").read_text().splitlines()) == 5
    # the newest checkpoint under out/; the same seed says the same; the prompt may be empty or longer than the block
    for prompt in ("Once upon a time", "", "Größe 🙂" * 20):
        said = []
        for _ in range(2):
            sample.main([f"--prompt={prompt}", "--max_new_tokens=30", "--num_samples=2", "--device=cpu"])
            out, err = capsys.readouterr()
            said.append(out)
        assert said[0] == said[1] and said[0].startswith(prompt) and "--- sample 2\n" + prompt in said[0]
        assert "tokens/s" in err
    train.main([*SMALL, "--attn=softmax", "--data=any.txt", "--out=out/y"])
    a, b = (json.loads(Path(f"out/{run}/log.jsonl").read_text().splitlines()[-1]) for run in "xy")
    assert a["tokens"] == b["tokens"] and b["lambda"] is None


def test_sample_streams_whole_characters_and_stops_at_eot(tmp_path, monkeypatch, capsys):
    tiny("softmax", vocab_size=257).save(tmp_path / "ckpt.pt", tokenizer="bytes")
    first, second = "é🙂".encode(), b"ab"
    script = [torch.tensor(row) for row in zip([*first, 256, 65, 65], [*second, 256, 65, 65, 65, 65, 65, 65])]
    monkeypatch.setattr(GPT, "generate", lambda self, idx, n, **how: iter(script))
    written = []
    monkeypatch.setattr(sys.stdout, "write", lambda s: written.append(s), raising=False)
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **k: None, raising=False)
    sample.main([f"--ckpt={tmp_path / 'ckpt.pt'}", "--num_samples=2", "--device=cpu"])
    assert "".join(written) == "é🙂\n\n--- sample 2\nab\n" and "🙂" in written and "�" not in "".join(written)
    assert "8 tokens in" in capsys.readouterr().err


# ---- bad input: one line, an exit code, no traceback


@pytest.mark.parametrize(
    "program,flags,says",
    [
        (train, ["--attn=cosine"], "cosine"),
        (train, ["--atn=diff"], "--atn"),
        (train, ["--steps=ten"], "--steps"),
        (train, ["--steps=0"], "--steps"),
        (train, ["--tokens=1.5"], "--tokens"),
        (train, ["--steps=5", "--tokens=5"], "not allowed"),
        (train, ["--lr=0"], "--lr"),
        (train, ["--lr=nan"], "--lr"),
        (train, ["--lambda_init=inf"], "--lambda_init"),
        (train, ["--seed=-1"], "--seed"),
        (train, ["--n_head=3"], "n_embd must be divisible by n_head=3"),
        (train, ["--attn=diff", "--n_head=1"], "n_head must be even for diff"),
        (train, ["--n_embd=1e9"], "no room"),
        (train, ["--total_batch=3000"], "the nearest is 2048"),
        (train, ["--device=tpu9"], "tpu9"),
        (train, ["--device=cuda:99"], "cuda:99"),
        (train, ["--data=nowhere"], "nowhere"),
        (train, ["--preset=gpt2", "--data=."], "no *_train_*.bin"),
        (train, ["--preset=gpt2"], "prepare_fineweb.py"),
        (train, ["--data=short.txt"], "sequence needs"),
        (train, ["--data=foreign"], "not a token shard"),
        (train, ["--data=cut"], "is cut"),
        (train, ["--data=beyond"], "token 300"),
        (train, ["--out=short.txt/x"], "short.txt"),
        (sample, [], "train.py"),
        (sample, ["--ckpt=nowhere.pt"], "nowhere.pt"),
        (sample, ["--ckpt=short.txt"], "short.txt"),
        (sample, ["--ckpt=."], "."),
        (sample, ["--temperature=-1"], "--temperature"),
        (sample, ["--top_p=2"], "--top_p"),
        (sample, ["--num_samples=0"], "--num_samples"),
    ],
)
def test_bad_input_ends_in_one_line(program, flags, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("too short")
    header = lambda n: np.array([20240520, 1, n] + [0] * 253, "<i4").tobytes()
    for folder, content in (("foreign", b"x" * 5000), ("cut", header(9000) + bytes(9000)),
                            ("beyond", header(9000) + np.full(9000, 300, "<u2").tobytes())):  # fmt: skip
        Path(folder).mkdir()
        for split in ("train", "val"):
            (Path(folder) / f"x_{split}_000000.bin").write_bytes(content)
        (Path(folder) / "manifest.json").write_text('{"tokenizer": "bytes", "shards": []}')
    with pytest.raises(SystemExit) as e:
        program.main([*flags])
    err = capsys.readouterr().err or f"{e.value.code}\n"  # a text given to sys.exit is printed by Python itself
    assert e.value.code not in (0, None) and err.count("\n") == 1 and says in err, err
    assert set(os.listdir()) - {"out"} == {"beyond", "cut", "foreign", "short.txt"}


def run(*command, cwd, **kwargs):
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, **kwargs)


def test_the_programs_as_a_user_starts_them(tmp_path):
    """From another folder, as processes: errors without a traceback, the demonstration, a closed pipe."""
    wrong = run(HERE / "train.py", "--attn=diff", "--steps=0", cwd=tmp_path)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and wrong.stdout == ""
    demo = run(HERE / "model.py", cwd=tmp_path)
    assert demo.returncode == 0 and all(attn in demo.stdout for attn in ALL) and len(demo.stdout.splitlines()) < 25
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("attn,below", [("softmax", 1.7), ("diff", 1.9), ("linear", 2.2), ("diff_linear", 2.5)])
def test_toy_run_learns(attn, below, tmp_path):
    """The preset as it is, on Python's manual."""
    done = run(HERE / "train.py", f"--attn={attn}", "--device=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last = json.loads((tmp_path / "out" / attn / "log.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 500 and last["val_loss"] < below
