"""What holds of model.py: `pytest test_model.py`, a minute on one CPU core. Read it beside the
tutorial.

Most tests take one attention layer in float64, where two ways of computing the same thing must
agree to 1e-10 or better. The tests marked cuda need a GPU and are skipped without one.
"""
import io
import math
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import model as model_module
from model import ATTENTION, GPT, GPTConfig, Linear, ModelError
from model import attention, make_rope, next_token, phi, rotate, round_to_bf16

torch.set_num_threads(1)  # on tensors this small, threads only wait for one another

ARMS = list(ATTENTION)
DIFFERENTIAL = ["diff", "diff_linear"]
LINEAR = ["linear", "diff_linear", "linear_average"]
SOFTMAX = [attn for attn in ARMS if attn not in LINEAR]
TINY = dict(block_size=32, vocab_size=97, n_layer=2, n_head=4, n_embd=32)

each_arm = pytest.mark.parametrize("attn", ARMS)
with_and_without_decay = pytest.mark.parametrize("decay", [False, True])
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def tiny_model(attn, seed=1337, **overrides):
    return GPT(GPTConfig(**TINY | dict(attn=attn) | overrides), seed)


def sharp_layer(attn, query_scale=3.0, **overrides):
    """The second attention layer in float64. Queries and keys are so large that no map is flat."""
    layer = tiny_model(attn, **overrides).double().blocks[1].attn
    with torch.no_grad():
        layer.q_proj.weight.mul_(query_scale / layer.q_proj.weight.std() / 32**0.5)
        layer.k_proj.weight.mul_(1 / layer.k_proj.weight.std() / 32**0.5)
        if layer.subln is not None:  # a weight that is not the same for all channels
            layer.subln.weight.add_(0.3 * normal(*layer.subln.weight.shape, seed=5))
        if attn == "diff_v2":  # lambdas from 0 to 1, and not all near 1/2
            layer.lambda_proj.weight.mul_(3)
    return layer


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def random_tokens(B, T, seed=0):
    return torch.randint(97, (B, T), generator=generator(seed))


def by_steps(layer, x, first=1):
    """layer(x) by the step form: the first tokens fill a state, then one token at a time."""
    T = x.shape[1]
    position = torch.arange(T, device=x.device)
    rope = make_rope(position[:first], layer.config, x.dtype)
    state = layer.prefill(x[:, :first], rope, room=T)
    outputs = [layer(x[:, :first], rope)]
    for t in range(first, T):
        rope = make_rope(position[t : t + 1], layer.config, x.dtype)
        outputs.append(layer.step(x[:, t : t + 1], rope, state))
    return torch.cat(outputs, dim=1)


def generated(model, idx, n, **options):
    """n new tokens of each row of idx, (B, n)."""
    return torch.stack(list(model.generate(idx, n, **options)), dim=1)


def assert_equal_to(tolerance, actual, expected, what):
    """Equal within tolerance, relative to 1 or the largest expected value, whatever is larger."""
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=tolerance * scale, msg=lambda message: f"{what}: {message}"
    )


def relative_error(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


# ---- the three forms, and the equations of the papers


@with_and_without_decay
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 200])  # around the size of a chunk
@each_arm
def test_the_three_forms_agree(attn, T, decay):
    layer = sharp_layer(attn, block_size=256, decay=decay)
    map_layer = sharp_layer(attn, block_size=256, decay=decay, flash=False)
    x = normal(2, T, 32).requires_grad_()
    weight = normal(2, T, 32, seed=1)

    fast = layer(x)
    fast_gradients = torch.autograd.grad((fast * weight).sum(), [x, *layer.parameters()])
    by_map = map_layer(x)
    map_gradients = torch.autograd.grad((by_map * weight).sum(), [x, *map_layer.parameters()])

    assert_equal_to(1e-10, fast, by_map, "fast form and map")
    names = ["x", *dict(layer.named_parameters())]
    for name, fast_gradient, map_gradient in zip(names, fast_gradients, map_gradients):
        assert_equal_to(1e-10, fast_gradient, map_gradient, f"gradient of {name}")

    with torch.no_grad():
        assert_equal_to(1e-10, by_steps(layer, x), by_map, "steps and map")
        two_thirds = T - T // 3
        assert_equal_to(1e-10, by_steps(layer, x, first=two_thirds), by_map, "steps after a prompt")


def one_row_of_a_map(q, keys, distance, span, linear):
    """Row i from the papers' equations: q (d,), keys (i + 1, d), distance i - j (i + 1,)."""
    d = len(q)
    D = np.exp(-distance / span)
    if linear:  # elu + 1
        q = np.where(q > 0, q + 1, np.exp(np.minimum(q, 0)))
        keys = np.where(keys > 0, keys + 1, np.exp(np.minimum(keys, 0)))
    # RoFormer, Eq. 12: two neighbouring channels are a complex number, which is turned
    theta = 10000 ** (-2 * np.arange(d // 2) / d)
    turn = np.exp(1j * distance[:, None] * theta)
    q_complex = q[0::2] + 1j * q[1::2]
    keys_complex = keys[:, 0::2] + 1j * keys[:, 1::2]
    product_ = (q_complex * keys_complex.conj() * turn).sum(-1).real
    if linear:
        return product_ * D / (keys @ q @ D)
    weights = np.exp(product_ / math.sqrt(d)) * D
    return weights / weights.sum()


def by_the_papers_equations(layer, x, spans):
    """layer(x) and its map, one row at a time, in numpy and with none of model.py's code."""
    B, T, C = x.shape
    attn = layer.config.attn
    d = C // layer.config.n_head
    q = (x @ layer.q_proj.weight.T).numpy(force=True)
    k = (x @ layer.k_proj.weight.T).numpy(force=True)
    v = (x @ layer.v_proj.weight.T).numpy(force=True)
    H = q.shape[-1] // d
    if attn == "diff_v2":  # the queries 2n and 2n + 1 have the key n
        k = k.reshape(B, T, -1, d).repeat(2, axis=2).reshape(B, T, H * d)
    queries_per_span = H // len(spans)

    A = np.zeros((B, H, T, T))
    U = np.zeros((H, T, T))
    for b, h, i in product(range(B), range(H), range(T)):
        channels = slice(h * d, (h + 1) * d)
        span = spans[h // queries_per_span]
        distance = i - np.arange(i + 1)
        row = one_row_of_a_map(
            q[b, i, channels], k[b, : i + 1, channels], distance, span, isinstance(layer, Linear)
        )
        A[b, h, i, : i + 1] = row
        U[h, i, : i + 1] = np.exp(-distance / span) / np.exp(-distance / span).sum()
    if attn in DIFFERENTIAL:  # Eq. 1 and 2
        lambda_1 = math.exp((layer.lambda_q1 @ layer.lambda_k1).item())
        lambda_2 = math.exp((layer.lambda_q2 @ layer.lambda_k2).item())
        A = A[:, 0::2] - (lambda_1 - lambda_2 + layer.lambda_init) * A[:, 1::2]
    if attn == "diff_v2":
        lam = 1 / (1 + np.exp(-(x @ layer.lambda_proj.weight.T).numpy(force=True)))  # (B, T, h)
        A = A[:, 0::2] - lam.transpose(0, 2, 1)[..., None] * A[:, 1::2]
    if attn in ("softmax_average", "linear_average"):
        A = A - layer.lambda_average.item() * U

    h = A.shape[1]
    y = A @ v.reshape(B, T, h, C // h).transpose(0, 2, 1, 3)  # (B, h, T, C/h)
    if layer.subln is not None:
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5)
        y = y * layer.subln.weight.numpy(force=True)
        if attn in DIFFERENTIAL:  # Eq. 3
            y = y * (1 - layer.lambda_init)
    y = y.transpose(0, 2, 1, 3).reshape(B, T, C)
    return y @ layer.out_proj.weight.numpy(force=True).T, A


@pytest.mark.parametrize("subln", [True, False])
@with_and_without_decay
@each_arm
def test_a_layer_is_the_papers_equations(attn, decay, subln):
    layer = sharp_layer(attn, subln=subln, decay=decay)
    assert (layer.subln is not None) == subln
    x = normal(2, 13, 32)
    spans = [math.inf] * 4
    if decay:  # from 4 tokens to twice the block of 32, evenly in log
        spans = [4, 64] if attn in DIFFERENTIAL else [4, 4 * 16 ** (1 / 3), 4 * 16 ** (2 / 3), 64]
    y, A = by_the_papers_equations(layer, x, spans)
    assert_equal_to(1e-12, layer.map(x), torch.from_numpy(A), "map")
    assert_equal_to(1e-12, layer(x), torch.from_numpy(y), "output")


@pytest.mark.parametrize("attn", ["softmax", "diff", "linear", "diff_linear"])
def test_the_straight_code_on_the_first_screen_is_the_layer(attn):
    layer = sharp_layer(attn)
    x = normal(2, 37, 32)
    assert_equal_to(1e-12, attention(layer, x, attn), layer(x), "output")


def test_lambda_init_counts_layers_from_0():
    blocks = tiny_model("diff", n_layer=4).blocks
    assert [round(block.attn.lambda_init, 4) for block in blocks] == [0.2, 0.3555, 0.4707, 0.5561]
    constant = tiny_model("diff", lambda_init=0.5).blocks
    assert [block.attn.lambda_init for block in constant] == [0.5, 0.5]


def test_rotation_is_exact_far_away():
    """Only the distance counts, also at position 10 million."""
    x = normal(1, 1, 2, 64).float()  # a query and a key
    scores = []
    for start in (0, 10_000_000):
        rope = make_rope(torch.tensor([start + 19, start]), GPTConfig(), torch.float32)
        q, k = rotate(x, rope)[0, 0]
        scores.append((q @ k).item())
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


# ---- precision


def test_phi_keeps_its_tail_in_bf16():
    x = torch.tensor([-20.0, -7.5, 0.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    (slope,) = torch.autograd.grad(phi(x).sum(), x)
    assert phi(x).tolist() == pytest.approx([math.exp(-20), math.exp(-7.5), 1, 3], rel=1e-2)
    assert slope.tolist() == pytest.approx([math.exp(-20), math.exp(-7.5), 1, 1], rel=1e-2)


@each_arm
def test_a_model_whose_weights_are_all_bf16_runs(attn):
    """lambda and the norms make float32 of an output, and the projection has to take it."""
    model = tiny_model(attn, subln=True).bfloat16()
    idx = random_tokens(1, 10)
    logits, _ = model(idx)
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
    assert len(generated(model, idx, 3, temperature=0)[0]) == 3


def errors_of_forms(attn, T=200, dtype=torch.bfloat16, device="cpu", **overrides):
    """Relative errors against the map in float64: of steps, map, fast form, and the gradients of
    the fast form.

    bfloat16 means float32 weights under autocast, as in training.
    """
    stored = torch.promote_types(dtype, torch.float32)
    overrides = dict(block_size=256) | overrides
    layer = sharp_layer(attn, **overrides).to(device, stored)
    map_layer = sharp_layer(attn, flash=False, **overrides).to(device, stored)
    x = normal(2, T, layer.config.n_embd).to(device, stored)
    weight = normal(2, T, layer.config.n_embd, seed=1).to(device, stored)

    def output_and_gradients(layer, x):
        x = x.requires_grad_()
        y = layer(x)
        return [y.detach(), *torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()])]

    exact = output_and_gradients(map_layer.double(), x.double())
    map_layer.to(stored)
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        with torch.no_grad():
            map_output = map_layer(x)
            step_output = by_steps(layer, x)
        fast = output_and_gradients(layer, x)
    found = [step_output, map_output, *fast]
    wanted = [exact[0], exact[0], *exact]
    return [relative_error(a, b) for a, b in zip(found, wanted)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@with_and_without_decay
@each_arm
def test_precision_of_every_form(attn, decay, dtype, device):
    """The subtraction costs digits: the error of diff is up to 2 sqrt(1 + lambda^2) / (1 - lambda)
    times as large."""
    torch.set_float32_matmul_precision("highest")
    options = dict(dtype=dtype, device=device, query_scale=0.3, n_embd=256, decay=decay)
    worst = max(errors_of_forms(attn, **options))
    bound = 1e-3
    if dtype == torch.bfloat16:
        bound = 3e-2 if decay else 2e-2
    assert worst < bound
    if attn == "diff" and dtype == torch.bfloat16:  # lambda is 0.36, so the factor is 3.3
        assert worst < 3.3 * max(errors_of_forms("softmax", **options))


@pytest.mark.parametrize("attn", SOFTMAX)
def test_scores_of_a_step_are_not_rounded_to_bf16(attn):
    step_error, _, fast_error, *_ = errors_of_forms(attn, query_scale=8.0)  # the scores are large
    assert step_error < 1.15 * fast_error


def test_long_sums_stay_in_float32():
    features = phi(torch.randn(8192, generator=generator(0))).bfloat16()
    assert abs(sum(features) - features.double().sum()) > 1000  # what a plain bf16 sum would do

    layer = sharp_layer("linear").float()
    x = normal(1, 8192, 32)
    rope = make_rope(torch.arange(8192), layer.config, x.dtype)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x.float())
            rounded_state = layer.prefill(x.float(), rope, room=0)
        exact = layer.double()(x)
        exact_state = layer.prefill(x, rope, room=0)
    assert relative_error(y[:, -64:], exact[:, -64:]) < 2e-2
    for name in ("S", "Z"):
        assert rounded_state[name].dtype == torch.float32
        assert relative_error(rounded_state[name], exact_state[name]) < 5e-3


def test_weights_are_rounded_to_bf16_and_lambdas_are_not():
    model = tiny_model("diff")
    round_to_bf16(model)
    for name, p in model.named_parameters():
        assert (p.dtype == torch.float32) == ("lambda" in name), name


# ---- configurations, parameters and their first values


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("attn", "cosine", "attn must be one of .*, linear_average, not 'cosine' .*"),
        ("n_embd", 36, "n_embd must be a multiple of 8, not 36"),
        ("n_head", 1, "n_head must be even for diff, not 1"),
        ("n_layer", 0, "n_layer must be at least 1, not 0"),
        ("decay", "no", "decay must be of type bool, not 'no'"),
        ("embd_init", math.nan, "embd_init must be finite, not nan"),
        ("embd_init", 0, "embd_init must be above 0, not 0"),
        ("lambda_init", 1.0, "lambda_init must be below 1, not 1.0"),
        ("rope_theta", -1.0, "rope_theta must be 0 or more, not -1.0"),
        ("kernel", "triton", "kernel must be sdpa or flash_attn, not 'triton'"),
    ],
)
def test_impossible_models_are_refused(field, value, message):
    with pytest.raises(ModelError, match=f"^{message}$"):
        GPTConfig(**TINY | {"attn": "diff", field: value})


def test_parameters_are_equal_but_for_lambda_and_norm():
    sizes = {}
    for attn in ARMS:
        sizes[attn] = sum(p.numel() for p in tiny_model(attn).parameters())
    lambda_and_norm = 4 * 8 + 16  # in each of the 2 layers
    assert sizes["linear"] == sizes["softmax"]
    assert sizes["diff"] == sizes["diff_linear"] == sizes["softmax"] + 2 * lambda_and_norm
    assert sizes["softmax_average"] == sizes["linear_average"] == sizes["softmax"] + 2
    # the MLP of diff_v2 is narrower, by whole units of 3 C parameters
    assert abs(sizes["diff_v2"] - sizes["softmax"]) <= 2 * 3 * 32 / 2
    assert tiny_model("softmax", mlp_width=24).blocks[0].mlp.up_proj.weight.shape == (24, 32)


def test_a_layer_has_the_names_and_shapes_of_microsofts_release():
    layer = tiny_model("diff").blocks[0].attn
    shapes = {name: tuple(p.shape) for name, p in layer.state_dict().items()}
    matrices = {f"{name}_proj.weight": (32, 32) for name in ("q", "k", "v", "out")}
    vectors = {f"lambda_{name}": (8,) for name in ("q1", "k1", "q2", "k2")}
    assert shapes == {**matrices, **vectors, "subln.weight": (16,)}


def test_shared_parameters_start_with_the_same_bits():
    softmax = tiny_model("softmax").state_dict()
    other_seed = tiny_model("softmax", seed=2).state_dict()
    torch.manual_seed(3)  # whatever the global generator is doing
    for attn in ("linear", "diff", "diff_linear"):
        other_arm = tiny_model(attn).state_dict()
        assert all(torch.equal(softmax[name], other_arm[name]) for name in softmax)
    for name in softmax:
        is_norm = "norm" in name  # which start at 1
        assert torch.equal(softmax[name], other_seed[name]) == is_norm


def test_parameters_start_with_the_stated_spread():
    sizes = dict(n_layer=3, n_head=8, n_embd=256, vocab_size=512, subln_init=0.2)
    model = GPT(GPTConfig(attn="diff", **sizes))
    for name, p in model.named_parameters():
        if "subln" in name:
            assert torch.equal(p, torch.full_like(p, 0.2))
        elif "norm" in name:
            assert torch.equal(p, torch.ones_like(p))
        elif "lambda" in name:
            assert p.std().item() == pytest.approx(0.1, rel=0.3)
        else:
            fan_in = 680 if "down_proj" in name else 256  # an MLP has 680 channels
            std = 1 / math.sqrt(3 * fan_in)
            if "out_proj" in name or "down_proj" in name:  # the ends of the residual branches
                std /= math.sqrt(2 * 3)
            assert p.std().item() == pytest.approx(std, rel=0.03), name
    large = tiny_model("diff", embd_init=0.5)
    assert large.wte.weight.std().item() == pytest.approx(0.5, rel=0.05)


@with_and_without_decay
@each_arm
def test_a_new_model_guesses_and_everything_in_it_learns(attn, decay):
    model = tiny_model(attn, decay=decay)
    idx = random_tokens(4, 257)
    logits, loss = model(idx[:, :-1], idx[:, 1:])
    assert logits.shape == (4, 256, 97)
    assert not logits.requires_grad
    assert loss.item() == pytest.approx(math.log(97), rel=0.08)
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad.abs().max() > 0, name


# ---- compiling and sampling


def test_compiles_without_a_break_in_the_graph():
    torch._dynamo.reset()
    model = tiny_model("diff_linear", n_layer=1, decay=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for T in (65, 64):
        idx = random_tokens(3, T)
        loss = compiled(idx, idx)[1]
        loss.backward()
        assert loss.item() == pytest.approx(model(idx, idx)[1].item(), abs=1e-5)


@pytest.mark.parametrize("prompt", [1, 40])  # 40 is longer than the block
@with_and_without_decay
@each_arm
def test_greedy_steps_equal_recomputation(attn, decay, prompt):
    model = tiny_model(attn, block_size=16, decay=decay).double()
    with torch.no_grad():
        for p in model.blocks.parameters():
            p.mul_(2)  # so that the context speaks louder than the last token
    idx = random_tokens(2, prompt, seed=1)
    new = generated(model, idx, 60, temperature=0)
    assert len(set(new[0].tolist())) > 5  # not one token for ever

    context = idx if attn in LINEAR else idx[:, -16:]
    for t in range(60):
        if attn not in LINEAR and context.shape[1] > 16:
            context = context[:, -8:]  # a full cache begins anew with its last half
        logits, _ = model(context)
        assert torch.equal(logits[:, -1].argmax(-1), new[:, t]), f"token {t}"
        context = torch.cat((context, new[:, t : t + 1]), dim=1)


@each_arm
def test_a_step_is_one_graph_of_static_shapes(attn):
    """Compiled once, it gives the same over refills of the cache, and for another prompt."""
    torch._dynamo.reset()
    model = tiny_model(attn, block_size=16, n_layer=1, decay=True).double()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model.step, backend=counter, fullgraph=True)
    for prompt in (7, 3):
        idx = random_tokens(2, prompt, seed=prompt)
        eager = generated(model, idx, 40, temperature=0)
        compiled = generated(model, idx, 40, temperature=0, step=step)
        assert torch.equal(eager, compiled)
    assert counter.frame_count == 1


def test_what_does_not_fit_is_refused():
    model = tiny_model("diff")
    with pytest.raises(ValueError, match="33 tokens don't fit into a cache of 32"):
        model.prefill(random_tokens(1, 33))
    _, state = model.prefill(random_tokens(1, 5))
    with pytest.raises(ValueError, match="a step takes one token of each row, not 2"):
        model.step(random_tokens(1, 2), state)
    with pytest.raises(IndexError, match="token 97: there are 97"):  # the embedding has 128
        model(torch.tensor([[1, 97]]))
    for wrong in (dict(temperature=-1), dict(top_k=0), dict(top_p=0.0), dict(top_p=1.5)):
        with pytest.raises(ModelError, match=next(iter(wrong))):
            next(model.generate(random_tokens(1, 4), 1, **wrong))


PROBS = [0.5, 0.3, 0.15, 0.05]
SQUARES = [0.25, 0.09, 0.0225, 0.0025]  # at temperature 0.5, but for their sum of 0.365


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(), PROBS),
        (dict(temperature=0), [1, 0, 0, 0]),
        (dict(temperature=1e-50), [1, 0, 0, 0]),
        (dict(temperature=0.5), [p / 0.365 for p in SQUARES]),
        (dict(top_k=2), [0.625, 0.375, 0, 0]),
        (dict(top_k=99), PROBS),
        (dict(top_p=0.79), [0.625, 0.375, 0, 0]),
        (dict(top_p=0.81), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (dict(top_k=2, top_p=0.6), [1, 0, 0, 0]),
    ],
)
def test_choices_follow_temperature_top_k_and_top_p(options, expected):
    order = [2, 0, 3, 1]  # so that the likeliest is not the first
    logits = torch.tensor(PROBS)[order].log().expand(20_000, -1)
    chosen = next_token(logits, generator=generator(0), **options)[:, 0]
    frequency = torch.bincount(chosen, minlength=4) / 20_000
    assert frequency.tolist() == pytest.approx([expected[i] for i in order], abs=0.02)


# ---- saving and loading


def test_a_checkpoint_gives_back_the_model_and_what_else_was_saved():
    model = tiny_model("diff_linear", decay=True)
    model.save("a.pt", tokenizer="bytes", val_loss=np.float64(1.5), steps=[np.int64(3)])
    loaded = GPT.load("a.pt", flash=False)
    assert asdict(loaded.config) == asdict(model.config) | dict(flash=False)
    assert loaded.extra == dict(tokenizer="bytes", val_loss=1.5, steps=[3])
    for name, p in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], p)
    with pytest.raises(ValueError, match="decay can't be changed: it would be another model"):
        GPT.load("a.pt", decay=False)
    with pytest.raises(TypeError, match="tensors and plain values"):
        model.save("b.pt", where=Path("a"))


def test_load_refuses_what_is_damaged_or_not_ours():
    class RunsCode:
        def __reduce__(self):
            return os.mkdir, ("boom",)

    model = tiny_model("diff")
    model.save("good.pt")
    whole = Path("good.pt").read_bytes()
    flipped = bytearray(whole)
    first_weight = whole.index(model.wte.weight.numpy(force=True).tobytes())
    flipped[first_weight + 1000] ^= 16  # one bit of one weight
    Path("flipped").write_bytes(flipped)
    torch.save({"config": None, "model": {}}, "foreign")
    torch.save({"config": RunsCode(), "model": {}}, "code")
    weights = model.state_dict()
    torch.save({"config": TINY | dict(attn="softmax"), "model": weights}, "misfit")
    model.blocks[0].attn.lambda_q1.data[3] = math.nan
    model.save("infinite")
    torch.save({"config": TINY | dict(gates=3), "model": weights}, "newer")
    for name, says in [
        ("flipped", "is damaged"),
        ("code", "is damaged, or no checkpoint"),
        ("foreign", "is a checkpoint of another program"),
        ("newer", "has settings that this model.py lacks: gates"),
        ("misfit", "its weights don't fit softmax"),
        ("infinite", "some weights are not finite"),
    ]:
        with pytest.raises(ModelError, match=f"^{name}:? {says}"):
            GPT.load(name)
    assert not Path("boom").exists()


@pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_or_ctrl_c_leaves_the_old_checkpoint_and_nothing_else(error, monkeypatch):
    class Interrupted(io.FileIO):
        def write(self, data):
            if self.tell() > 0:  # the first bytes fit
                raise error
            return super().write(data)

    model = tiny_model("diff")
    model.save("a.pt")
    before = Path("a.pt").read_bytes()
    with monkeypatch.context() as context, pytest.raises(type(error)):
        context.setattr("builtins.open", lambda path, mode: Interrupted(path, mode))
        model.save("a.pt", step=2)
    assert os.listdir() == ["a.pt"]
    assert Path("a.pt").read_bytes() == before


# ---- kernels


def alibi_attention(q, k, v, softmax_scale, causal, alibi_slopes):
    """What flash_attn_func of flash-attn 2 computes, as far as we use it: (B, T, H, d), d_v = d."""
    assert causal
    assert q.shape == k.shape == v.shape
    i = torch.arange(q.shape[1])
    distance = i[:, None] - i
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * softmax_scale
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * distance
    A = scores.masked_fill(distance < 0, -math.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", A, v)


@with_and_without_decay
@pytest.mark.parametrize("attn", SOFTMAX)
def test_the_package_flash_attn_equals_the_map(attn, decay, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=alibi_attention))
    tolerance = 1e-6 if decay else 1e-10  # its slopes are float32
    options = dict(T=70, dtype=torch.float64, decay=decay, kernel="flash_attn")
    assert max(errors_of_forms(attn, **options)) < tolerance


@pytest.mark.parametrize("attn", SOFTMAX)
def test_the_call_on_hopper_equals_the_map(attn, monkeypatch):
    """On a CPU PyTorch's plain path stands in for cuDNN and takes its shapes: d_v = 2d."""
    asked_for = []

    def any_backend(backends, set_priority):
        asked_for.append(backends[0].name)
        return nullcontext()

    pretend_to_be_a_hopper(monkeypatch)
    monkeypatch.setattr(model_module, "sdpa_kernel", any_backend)
    assert max(errors_of_forms(attn, T=70, dtype=torch.float64)) < 1e-10
    assert set(asked_for) == {"CUDNN_ATTENTION"}


def pretend_to_be_a_hopper(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9)
    )


def test_where_no_kernel_fits_one_sentence_says_so(monkeypatch):
    x = random_tokens(1, 5)
    with pytest.raises(ModelError, match="needs the package flash-attn"):
        monkeypatch.setitem(sys.modules, "flash_attn", None)  # not installed
        tiny_model("diff", kernel="flash_attn")(x)
    model = tiny_model("diff")
    pretend_to_be_a_hopper(monkeypatch)  # but it is a CPU
    with pytest.raises(ModelError, match="^no fused kernel for .* on cpu: use --no-flash"):
        model(x)


@cuda
@each_arm
def test_cuda_compiled_equals_eager(attn):
    torch._dynamo.reset()
    model = tiny_model(attn, n_embd=256, block_size=16, decay=True).cuda()
    idx = random_tokens(2, 129).cuda()
    step = torch.compile(model.step, mode="reduce-overhead", fullgraph=True)
    eager = generated(model, idx[:, :7], 40, temperature=0)
    compiled = generated(model, idx[:, :7], 40, temperature=0, step=step)
    assert (eager == compiled).float().mean() > 0.9  # another order of sums may turn a near tie
    with torch.autocast("cuda", torch.bfloat16):
        plain = model(idx[:, :-1], idx[:, 1:])[1].item()
        loss = torch.compile(model, fullgraph=True)(idx[:, :-1], idx[:, 1:])[1]
    assert loss.item() == pytest.approx(plain, abs=2e-2)
    loss.backward()
    for name, p in model.named_parameters():
        assert 0 < p.grad.abs().max() < math.inf, name
