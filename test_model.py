"""
What holds of model.py: `pytest test_model.py`, half a minute on one core.

Most tests take one attention layer in float64. Those on cuda are skipped where there is no GPU.
"""
import math
import os
import sys
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from model import ATTENTION, GPT, GPTConfig, Softmax
from model import attention, make_rope, next_token, phi, rotate, softmax_attention

torch.set_num_threads(1)  # on tensors this small, threads only wait for one another

ARMS = list(ATTENTION)
SOFTMAX = ["softmax", "softmax_average", "diff", "diff_v2"]
LINEAR = ["linear", "linear_average", "diff_linear"]
SIZES = [1, 2, 63, 64, 65, 200]  # around a chunk
TINY = dict(block_size=32, vocab_size=97, n_layer=2, n_head=4, n_embd=32)
each_arm = pytest.mark.parametrize("attn", ARMS)


class Mean(nn.Module):  # the least that an arm of one's own needs
    def __init__(self, config, depth):
        super().__init__()
        self.v_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.v_proj(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class TurningMean(Mean):
    def forward(self, x, rope):
        return super().forward(x * rope[0][:, :1].to(x))  # the cosines of the first angle


OWN = {"mean": Mean, "turning_mean": TurningMean}
for attn in ARMS:
    class Own(ATTENTION[attn]):
        def project(self, x):  # QK-Norm
            q, k, v = super().project(x)
            return 3 * F.normalize(q, dim=-1), 3 * F.normalize(k, dim=-1), v

        def lam(self, x):  # a number for each token
            return x.mean(-1).sigmoid()[:, None, :, None]  # (B, 1, T, 1)

    OWN[f"own {attn}"] = Own


@pytest.fixture(autouse=True)
def know_our_own_arms(monkeypatch):
    for name, arm in OWN.items():
        monkeypatch.setitem(ATTENTION, name, arm)


def tiny_model(attn, **settings):
    return GPT(GPTConfig(**TINY | dict(attn=attn) | settings), seed=1337)


def sharp_layer(attn, scale=3.0, **settings):
    """The second layer's attention in float64. Its queries are so large that no map is flat."""
    layer = tiny_model(attn, **settings).double().blocks[1].attn
    with torch.no_grad():  # for inputs of std 1 the queries have the std scale, and the keys 1
        layer.q_proj.weight.mul_(3**0.5 * scale)
        layer.k_proj.weight.mul_(3**0.5)
    return layer


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_tokens(B, T, seed=0):
    return torch.randint(97, (B, T), generator=torch.Generator().manual_seed(seed))


def error(a, b, least=1.0):
    """Of a, relative to the size of b, or to the least size if that is larger."""
    return ((a.double() - b).norm() / max(b.norm(), least)).item()


# ---- the forms of a layer, and the equations of the papers

def by_map(layer, x):
    return layer.output(layer.map(x) @ layer.project(x)[2].to(x.dtype), x)


def in_parts(layer, x, lengths):
    """layer(x), read in parts of so many tokens, with a state."""
    state = {}
    outputs = []
    for part in x.split(lengths, dim=1):
        start = sum(y.shape[1] for y in outputs)
        rope = make_rope(layer.config, part.shape[1], x.device, x.dtype, start)
        outputs.append(layer(part, rope, state))
    return torch.cat(outputs, dim=1)


def value_and_gradients(form, layer, x, *lengths):
    x = x.detach().requires_grad_()
    y = form(layer, x, *lengths)
    loss = (y * normal(*y.shape, seed=1)).sum()
    return y, *torch.autograd.grad(loss, [x, *layer.parameters()], materialize_grads=True)


def errors_of_forms(layer, T, dtype=torch.float64):
    """Against the map in float64: of the map, the fast form, two parts with a state, and a prompt
    with single tokens after it; and of their gradients. bfloat16 is autocast, as in training.
    """
    x = normal(2, T, layer.config.n_embd)
    exact = value_and_gradients(by_map, layer, x)
    layer.to(torch.promote_types(dtype, torch.float32))
    x = x.to(layer.q_proj.weight.dtype)
    prompt = max(1, 3 * T // 4)
    with torch.autocast("cpu", enabled=dtype == torch.bfloat16):
        found = [value_and_gradients(by_map, layer, x)]
        for lengths in ([T], [prompt, T - prompt], [prompt] + [1] * (T - prompt)):
            found.append(value_and_gradients(in_parts, layer, x, [n for n in lengths if n > 0]))
    gradients = []
    for y, *form in found:  # lambda's may be near 0, a sum of large terms: so compare with x's
        gradients += [error(a, b, least=exact[1].norm()) for a, b in zip(form, exact[1:])]
    return [error(y, exact[0]) for y, *_ in found], gradients


@each_arm
def test_nothing_sees_the_future(attn):
    """Other last tokens change no earlier output: of the map, of a layer, of the whole GPT."""
    layer = sharp_layer(attn)
    model = tiny_model(attn).double()

    def outputs(seed):  # of the second half
        x = torch.cat((normal(2, 75, 32), normal(2, 75, 32, seed=seed)), dim=1)
        idx = torch.cat((random_tokens(2, 75), random_tokens(2, 75, seed)), dim=1)
        state = {}
        model(idx[:, :40], state=state)
        logits = [model(idx, idx)[0], model(idx[:, 40:], idx[:, 40:], state)[0]]
        return [layer(x), by_map(layer, x), in_parts(layer, x, [40, 110]), *logits]

    for a, b in zip(outputs(seed=1), outputs(seed=2)):
        assert error(a[:, :-75], b[:, :-75]) < 1e-12
        assert (a[:, -75:] - b[:, -75:]).abs().amax(-1).min() > 1e-3  # but later ones do change


@pytest.mark.parametrize("attn, T", [*product(ARMS, SIZES), *product(list(OWN)[2:], [70])])
def test_the_map_the_fast_form_and_the_state_agree(attn, T):
    values, gradients = errors_of_forms(sharp_layer(attn), T)
    assert max(values + gradients) < 1e-10


def by_the_papers_equations(layer, x):
    """layer(x) and its map, in numpy and with none of model.py's code."""
    B, T, C = x.shape
    attn = layer.config.attn
    d = C // layer.config.n_head
    weight = {name: p.numpy(force=True) for name, p in layer.named_parameters()}
    x = x.numpy()
    q, k = [
        (x @ weight[f"{name}_proj.weight"].T).reshape(B, T, -1, d).swapaxes(1, 2) for name in "qk"
    ]  # (B, H, T, d)
    if attn == "diff_v2":  # the queries 2n and 2n + 1 have the key n
        k = k.repeat(2, axis=1)
    if attn in LINEAR:  # elu + 1
        q, k = [np.where(a > 0, a + 1, np.exp(np.minimum(a, 0))) for a in (q, k)]
    # RoFormer, Eq. 12: two neighbouring channels are a complex number, which is turned
    turn = np.exp(1j * np.outer(np.arange(T), 10000 ** (-2 * np.arange(d // 2) / d)))  # (T, d/2)
    q_turned, k_turned = [(a[..., 0::2] + 1j * a[..., 1::2]) * turn for a in (q, k)]
    scores = (q_turned @ k_turned.conj().swapaxes(2, 3)).real  # (B, H, T, T)
    if attn in LINEAR:
        A = np.tril(scores) / np.tril(q @ k.swapaxes(2, 3)).sum(-1, keepdims=True)
    else:
        weights = np.tril(np.exp(scores / math.sqrt(d)))
        A = weights / weights.sum(-1, keepdims=True)
    if attn == "diff_v2":
        lam = 1 / (1 + np.exp(-x @ weight["lambda_proj.weight"].T))  # (B, T, h)
        A = A[:, 0::2] - lam.swapaxes(1, 2)[..., None] * A[:, 1::2]
    elif "diff" in attn:  # Eq. 1 and 2. The second layer: l = 1, counted from 0
        lambda_init = 0.8 - 0.6 * math.exp(-0.3 * 1)
        lambda_1 = math.exp(weight["lambda_q1"] @ weight["lambda_k1"])
        lambda_2 = math.exp(weight["lambda_q2"] @ weight["lambda_k2"])
        A = A[:, 0::2] - (lambda_1 - lambda_2 + lambda_init) * A[:, 1::2]
    if "average" in attn:
        A = A - weight["lambda_average"] * np.tri(T) / np.arange(1, T + 1)[:, None]
    h = A.shape[1]
    y = A @ (x @ weight["v_proj.weight"].T).reshape(B, T, h, C // h).swapaxes(1, 2)
    if "subln.weight" in weight:
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * weight["subln.weight"]
        if attn in ("diff", "diff_linear"):  # Eq. 3
            y = y * (1 - lambda_init)
    y = y.swapaxes(1, 2).reshape(B, T, C) @ weight["out_proj.weight"].T
    return torch.from_numpy(y), torch.from_numpy(A)


@pytest.mark.parametrize("subln", [None, 0.0, 0.7])
@each_arm
def test_a_layer_is_the_papers_equations_and_the_straight_code(attn, subln):
    layer = sharp_layer(attn, subln=subln, scale=30.0)
    x = 0.1 * normal(2, 13, 32)  # small, so that the norm's epsilon counts
    y, A = by_the_papers_equations(layer, x)
    assert error(layer.map(x), A) < 1e-12
    assert error(layer(x), y) < 1e-12
    if subln is not None:
        assert (layer.subln is None) == (subln == 0)
    elif attn in ("softmax", "diff", "linear", "diff_linear"):
        assert error(attention(layer, x, attn), y) < 1e-12


def test_rotation_is_exact_far_away():
    """Only the distance counts, also at position 10 million."""
    x = normal(1, 1, 20, 64).float()
    ropes = [make_rope(GPTConfig(), 20, "cpu", x.dtype, start) for start in (0, 10_000_000)]
    near, far = [rotate(x, rope) @ rotate(x, rope).mT for rope in ropes]
    assert error(far, near.double()) < 1e-6


def flash_attn_func(q, k, v, softmax_scale, causal):
    """What the package flash-attn computes: all are (B, T, H, d), with one d."""
    q, k, v = torch.stack((q, k, v)).transpose(2, 3)
    y = F.scaled_dot_product_attention(q, k, v, scale=softmax_scale, is_causal=causal)
    return y.transpose(1, 2)


@pytest.mark.filterwarnings("ignore:.*kernel")
@pytest.mark.parametrize("kernel", ["map", "flash_attn", "sdpa", "sdpa on a Hopper"])
@pytest.mark.parametrize("attn", SOFTMAX)
def test_every_kernel_is_the_map_and_none_holds_it_in_silence(attn, kernel, monkeypatch):
    """Stand-ins take the shapes of flash-attn, and of cuDNN, whose values may be wider."""
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    if "Hopper" in kernel:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=9))
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    if "sdpa" in kernel:
        x = normal(1, 2, 8, 5).mT  # its channels are apart in memory: no fused kernel takes that
        with pytest.raises(RuntimeError, match="No (viable|available)"):
            softmax_attention(x, x, x, "sdpa")
        monkeypatch.setattr("model.sdpa_kernel", lambda *_, **options: nullcontext())
    values, gradients = errors_of_forms(sharp_layer(attn, kernel=kernel.split()[0]), T=70)
    assert max(values + gradients) < 1e-10


def test_phi_keeps_its_tail_in_bf16():
    x = torch.tensor([-20.0, -7.5, 0.0, 2.0], dtype=torch.bfloat16)
    assert phi(x).tolist() == pytest.approx([math.exp(-20), math.exp(-7.5), 1, 3], rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@each_arm
def test_precision_of_every_form(attn, dtype):
    """A rounding errs by up to u, on average by u / sqrt(3), and from x to y there are some 8 in a
    row: with random signs 1.6 u. The difference of two maps enlarges that, if they are alike, by up
    to 2 sqrt(1 + lambda^2) / (1 - lambda), here 3.3: 6 u. In float32 a sum is rounded at each of
    its 256 terms: sqrt(256) times that. The gradients go there and back: twice that.
    """
    bound = 6 * 2**-9 if dtype == torch.bfloat16 else 6 * 2**-24 * 16
    values, gradients = errors_of_forms(sharp_layer(attn, scale=1.0, n_embd=256), 200, dtype)
    assert max(values) < bound
    assert max(gradients) < 2 * bound


@pytest.mark.parametrize("attn", SOFTMAX)
def test_scores_of_a_step_are_not_rounded_to_bf16(attn):
    errors, _ = errors_of_forms(sharp_layer(attn, scale=8.0, n_embd=256), 200, torch.bfloat16)
    assert max(errors) < 1.15 * errors[1]  # the map's and those of steps, and the fast form's


@pytest.mark.parametrize("attn", [*LINEAR, "softmax_average"])
def test_long_sums_stay_in_float32(attn):
    layer = sharp_layer(attn)
    x = normal(1, 4096, 32)
    exact, state = {}, {}
    layer(x, state=exact)
    with torch.autocast("cpu"):
        layer.float()(x.float(), state=state)
    for name in {"S", "Z", "total"} & state.keys():
        assert not torch.equal(state[name].float(), state[name].bfloat16().float())  # not rounded
        assert error(state[name], exact[name]) < 5e-3


# ---- the parameters and their first values

FIRST = dict(softmax=222.654524, softmax_average=223.054524, diff=270.562823, diff_v2=237.416492)
FIRST |= dict(linear=222.654524, linear_average=223.054524, diff_linear=270.562823)


def test_impossible_models_are_refused():
    for settings, message in [
        (dict(attn="cosine"), "attn is 'cosine' .*, and not one of softmax, .*, diff_linear"),
        (dict(attn="diff", n_head=1), "n_head must be .*, not 1"),
        (dict(n_embd=36), "n_embd must be a multiple of 8, not 36"),
    ]:
        with pytest.raises(ValueError, match=message):
            GPTConfig(**TINY | settings)


def test_parameters_are_those_of_microsofts_release_and_as_many_as_softmax_has():
    """MultiheadDiffAttn(embed_dim=32, num_heads=2) of github.com/microsoft/unilm"""
    shapes = {name: tuple(p.shape) for name, p in sharp_layer("diff").named_parameters()}
    matrices = {f"{name}_proj.weight": (32, 32) for name in ("q", "k", "v", "out")}
    vectors = {f"lambda_{name}": (8,) for name in ("q1", "k1", "q2", "k2")}
    assert shapes == {**matrices, **vectors, "subln.weight": (16,)}

    sizes = {attn: sum(p.numel() for p in tiny_model(attn).parameters()) for attn in ARMS}
    more = {attn: sizes[attn] - sizes["softmax"] for attn in ARMS}
    assert abs(more.pop("diff_v2")) <= 2 * 3 * 32 / 2  # its MLPs are narrower by whole channels
    averages = dict(softmax_average=2, linear_average=2)
    assert more == dict(softmax=0, linear=0, diff=2 * 48, diff_linear=2 * 48) | averages


@each_arm
def test_shared_parameters_start_with_the_same_bits(attn):
    """And with those of commit 6d48cee, whose runs can be compared with those of today."""
    softmax = tiny_model("softmax").state_dict()
    total = 0
    for name, p in tiny_model(attn).state_dict().items():
        total += p.double().flatten() @ torch.linspace(1, 2, p.numel(), dtype=torch.float64)
        if name in softmax and p.shape == softmax[name].shape:
            assert torch.equal(p, softmax[name]), name
    assert total.item() == pytest.approx(FIRST[attn], abs=1e-4)
    norm = tiny_model(attn, subln=0.2).blocks[0].attn.subln
    assert norm.weight.tolist() == pytest.approx([0.2] * len(norm.weight))


@pytest.mark.parametrize("attn", [*ARMS, "mean", "turning_mean"])
def test_a_new_model_guesses_and_everything_in_it_learns_and_runs_in_bf16(attn):
    model = tiny_model(attn)
    idx = random_tokens(4, 257)
    logits, loss = model(idx[:, :-1], idx[:, 1:])
    assert logits.shape == (4, 256, 97) and not logits.requires_grad
    assert loss.item() == pytest.approx(math.log(97), rel=0.08)
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad.abs().max() > 0, name
    assert model.bfloat16()(idx)[0].dtype == torch.bfloat16
    assert len(list(model.generate(idx, 3))) == 3


# ---- compiling, sampling, saving

@pytest.mark.parametrize("attn, device", [("diff_linear", "cpu"), *product(ARMS, ["cuda"])])
def test_compiles_without_a_break_in_the_graph(attn, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.compiler.reset()
    model = tiny_model(attn, n_layer=1, n_embd=256).to(device)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    for T in (65, 64):
        idx = random_tokens(3, T).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            eager = model(idx, idx)[1].item()
            loss = compiled(idx, idx)[1]
        loss.backward()
        assert loss.item() == pytest.approx(eager, abs=2e-2 if device == "cuda" else 1e-5)


@pytest.mark.parametrize("prompt", [1, 40])  # 40 is longer than the block
@pytest.mark.parametrize("attn", [*ARMS, "mean", "turning_mean"])
def test_greedy_tokens_equal_recomputation(attn, prompt):
    """Where a block of softmax is full, its newer half is read anew. Linear arms just go on."""
    model = tiny_model(attn, block_size=16).double()
    with torch.no_grad():
        for p in model.blocks.parameters():
            p.mul_(2)  # so that the context speaks louder than the last token
    limit = 1000 if attn in LINEAR else 16
    text = random_tokens(2, prompt, seed=1)
    new = torch.stack(list(model.generate(text, 60, temperature=0)))  # (60, B)
    assert len(set(new.flatten().tolist())) > 5  # not one token for ever
    text = text[:, -limit:]
    for token in new:
        if text.shape[1] > limit:
            text = text[:, -limit // 2 :]
        assert torch.equal(model(text)[0][:, -1].argmax(-1), token)
        text = torch.cat((text, token[:, None]), dim=1)


def test_choices_follow_temperature_and_top_k():
    probs = torch.tensor([0.15, 0.5, 0.05, 0.3])
    likeliest = torch.tensor([0.0, 1, 0, 0])
    by_temperature = [(1.0, None, probs), (0.5, None, probs**2 / 0.365), (0.0, None, likeliest)]
    by_top_k = [(1.0, 2, torch.tensor([0, 0.625, 0, 0.375])), (1e-50, 99, likeliest)]
    for temperature, top_k, expected in by_temperature + by_top_k:
        generator = torch.Generator().manual_seed(0)
        chosen = next_token(probs.log().expand(20_000, -1), temperature, top_k, generator)
        assert error(chosen.flatten().bincount(minlength=4) / 20_000, expected) < 0.02


def test_a_checkpoint_gives_the_model_back_and_a_kill_leaves_the_old_one(monkeypatch):
    model = tiny_model("diff_linear", kernel="map")
    model.save("a.pt", step=7)
    monkeypatch.delattr(os, "replace")
    with pytest.raises(AttributeError):  # it ends before the new file gets the old one's name
        tiny_model("diff").save("a.pt", step=8)
    loaded = GPT.load("a.pt")
    assert loaded.config == tiny_model("diff_linear").config  # the kernel is no part of a model
    assert loaded.extra == dict(step=7) and not loaded.training
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_load_refuses_what_is_damaged_or_not_ours():
    class RunsCode:
        def __reduce__(self):
            return os.mkdir, ("boom",)

    tiny_model("diff").save("code", more=RunsCode())
    Path("cut").write_bytes(Path("code").read_bytes()[:-1000])
    torch.save(tiny_model("diff").state_dict(), "foreign")
    for name in ("code", "cut", "foreign", "missing"):
        with pytest.raises(ValueError, match=f"^{name} can't be loaded: "):
            GPT.load(name)
    assert not Path("boom").exists()
