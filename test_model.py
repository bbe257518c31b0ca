"""
What holds of model.py: `pytest test_model.py`, a minute on one core.

Most tests take one attention layer in float64. Those on cuda are skipped where there is no GPU.
"""
import copy
import math
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import equations
from model import ATTENTION, GPT, Attention, Diff, DiffV2, GPTConfig, Softmax
from model import SoftmaxAverage, fused_attention, make_rope, next_token, phi, rotate, softmax_map

torch.set_num_threads(1)  # on tensors this small, threads only wait for one another

# the lab's have joined if its tests run, too
ARMS = [name for name, arm in ATTENTION.items() if arm.__module__ == "model"]
SOFTMAX = ["softmax", "softmax_average", "diff", "diff_v2"]
LINEAR = ["linear", "linear_average", "diff_linear"]
SIZES = [1, 2, 63, 64, 65, 200]  # around a chunk
TINY = dict(block_size=32, vocab_size=97, n_layer=2, n_head=4, n_embd=32)
each_arm = pytest.mark.parametrize("attn", ARMS)
need_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Mean(Attention):
    """A forward of its own, and neither a map nor a state."""

    def forward(self, x, rope, state):
        return self.v_proj(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class Sparse(Softmax):
    """A map of its own, which must not train the attend of softmax."""

    def make_map(self, q, k, x, rope):
        return F.relu(super().make_map(q, k, x, rope) - 0.05)


class Mixin:
    def make_map(self, q, k, x, rope):
        return F.relu(softmax_map(q, k, rope) - 0.05)


class Mixed(Mixin, Softmax):
    pass


class Louder(Softmax):
    """An attend of its own, whose map nobody knows. It keeps no state."""

    def attend(self, q, k, v, x, rope, state):
        return 2 * super().attend(q, k, v, x, rope, {})


class Gated(Diff):
    """A forward around that of its parent, which keeps its map and its state."""

    def forward(self, x, rope=None, state=None):
        return super().forward(x, rope, state) * x.mean(-1, keepdim=True).sigmoid()


STATELESS = {"mean": Mean, "sparse": Sparse, "mixed": Mixed, "louder": Louder}
NORMED = {}  # arms with other queries, keys and lambda, whose forms have to follow
for attn in ARMS:
    class Normed(ATTENTION[attn]):
        def project(self, x):  # QK-Norm
            q, k, v = super().project(x)
            return 3 * F.normalize(q, dim=-1), 3 * F.normalize(k, dim=-1), v

        def lam(self, x):  # a number for each token
            return x.mean(-1).sigmoid()[:, None, :, None]  # (B, 1, T, 1)

    NORMED[f"normed {attn}"] = Normed
OWN = STATELESS | NORMED | {"gated": Gated}


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
    a, b = a.double().cpu(), b.double().cpu()
    return ((a - b).norm() / max(b.norm(), least)).item()


# ---- the forms of a layer, and the equations of the papers

def by_map(layer, x):
    """The layer through make_map."""
    kernel, layer.config.kernel = layer.config.kernel, "map"
    y = layer(x)
    layer.config.kernel = kernel
    return y


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
    loss = (y * normal(*y.shape, seed=1).to(y.device)).sum()
    return y, *torch.autograd.grad(loss, [x, *layer.parameters()], materialize_grads=True)


def errors_of_forms(layer, T, dtype=torch.float64, device="cpu"):
    """{form: (error of its values, largest error of its gradients)}, against the map in float64.

    The forms are the map, the fast form, two parts with a state, and a prompt with single tokens
    after it. bfloat16 is autocast, as in training.
    """
    x = normal(2, T, layer.config.n_embd)
    exact = value_and_gradients(by_map, layer, x)
    layer = copy.deepcopy(layer).to(device, torch.promote_types(dtype, torch.float32))
    x = x.to(device, layer.q_proj.weight.dtype)
    prompt = max(1, 3 * T // 4)
    lengths = {"fast": [T], "two parts": [prompt, T - prompt]}
    lengths["steps"] = [prompt] + [1] * (T - prompt)
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = {"map": value_and_gradients(by_map, layer, x)}
        for form, parts in lengths.items():
            parts = [n for n in parts if n > 0]
            found[form] = value_and_gradients(in_parts, layer, x, parts)
    errors = {}
    for form, (y, *gradients) in found.items():
        # lambda's may be near 0, a sum of large terms: so compare with x's
        least = exact[1].norm()
        of_gradients = [error(a, b, least) for a, b in zip(gradients, exact[1:], strict=True)]
        errors[form] = (error(y, exact[0]), max(of_gradients))
    return errors


def assert_below(errors, bound, of_gradients=None):
    for form, (value, gradient) in errors.items():
        assert value < bound, form
        assert gradient < (of_gradients or bound), form


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


@pytest.mark.parametrize("attn, T", [*product(ARMS, SIZES), *product(NORMED, [70])])
def test_the_map_the_fast_form_and_the_state_agree(attn, T):
    assert_below(errors_of_forms(sharp_layer(attn), T), 1e-10)


def by_the_papers_equations(layer, x):
    """layer(x) and its map, by equations.py. The layer is a model's second one."""
    weight = {name: p.numpy(force=True) for name, p in layer.named_parameters()}
    found = equations.layer(layer.config.attn, weight, x.numpy(), layer.config.n_head, depth=1)
    return torch.from_numpy(found["y"]), torch.from_numpy(found["A"])


@pytest.mark.parametrize("subln", [None, 0.0, 0.7])
@each_arm
def test_a_layer_is_the_papers_equations(attn, subln):
    layer = sharp_layer(attn, subln=subln, scale=30.0)
    x = 0.1 * normal(2, 13, 32)  # small, so that the norm's epsilon counts
    y, A = by_the_papers_equations(layer, x)
    assert error(layer.map(x), A) < 1e-12
    assert error(layer(x), y) < 1e-12
    assert (layer.subln is None) == (subln == 0 if subln is not None else layer.usual_subln == 0)


def test_rotation_is_exact_far_away():
    """Only the distance counts, also at position 10 million."""
    x = normal(1, 1, 20, 64).float()
    ropes = [make_rope(GPTConfig(), 20, "cpu", x.dtype, start) for start in (0, 10_000_000)]
    near, far = [rotate(x, rope) @ rotate(x, rope).mT for rope in ropes]
    assert error(far, near.double()) < 1e-6


def test_a_row_whose_features_are_all_0_is_no_nan():
    layer = sharp_layer("linear").float()
    x = -1e3 * layer.q_proj.weight.pinverse().sum(1).detach()  # all queries are very negative
    assert layer(x.expand(1, 3, 32)).isfinite().all()


def flash_attn_func(q, k, v, softmax_scale, causal):
    """What the package flash-attn computes: all are (B, T, H, d), with one d."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and causal
    q, k, v = [x.transpose(1, 2) for x in (q, k, v)]
    T, S = q.shape[2], k.shape[2]  # the queries are the last ones
    mask = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale).transpose(1, 2)


@pytest.mark.parametrize("kernel", ["flash_attn", "sdpa", "sdpa on a Hopper"])
@pytest.mark.parametrize("attn", SOFTMAX)
def test_every_kernel_is_the_map(attn, kernel, monkeypatch):
    """Stand-ins take the shapes of flash-attn, and of cuDNN, whose values may be wider."""
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    if "Hopper" in kernel:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=9))
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    if "sdpa" in kernel:
        monkeypatch.setattr("model.sdpa_kernel", lambda *_, **options: nullcontext())
    assert_below(errors_of_forms(sharp_layer(attn, kernel=kernel.split()[0]), T=70), 1e-10)


@pytest.mark.filterwarnings("ignore:.*kernel")
def test_no_kernel_holds_the_map_in_silence():
    x = normal(1, 2, 8, 5).mT  # its channels are apart in memory: no fused kernel takes that
    with pytest.raises(RuntimeError, match="No (viable|available)"):
        fused_attention(x, x, x, "sdpa")


@need_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@each_arm
def test_every_form_on_a_gpu_has_the_values_and_gradients_of_float64(attn, dtype):
    """The bounds are those of test_precision_of_every_form. TF32 is off, PyTorch's default."""
    bound = 6 * 2**-9 if dtype == torch.bfloat16 else 6 * 2**-24 * 16
    layer = sharp_layer(attn, scale=1.0, n_embd=256)
    assert_below(errors_of_forms(layer, 200, dtype, "cuda"), bound, of_gradients=2 * bound)


@need_cuda
def test_a_gpus_gradients_are_right_in_any_layout():
    """One after the other in one process: see OneLayout."""
    q, k, v = [normal(2, 4, 256, 64, seed=i).to("cuda", torch.bfloat16) for i in range(3)]
    dy = normal(2, 256, 4, 64, seed=3).to("cuda", torch.bfloat16).transpose(1, 2)
    gradients = []
    for layout in (dy, dy.contiguous()):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        gradients.append(torch.autograd.grad(fused_attention(*inputs, "sdpa"), inputs, layout))
    for one, other in zip(*gradients):
        assert error(one, other) < 1e-2


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
    layer = sharp_layer(attn, scale=1.0, n_embd=256)
    assert_below(errors_of_forms(layer, 200, dtype), bound, of_gradients=2 * bound)


@pytest.mark.parametrize("attn", SOFTMAX)
def test_scores_of_a_step_are_not_rounded_to_bf16(attn):
    errors = errors_of_forms(sharp_layer(attn, scale=8.0, n_embd=256), 200, torch.bfloat16)
    values = {form: value for form, (value, _) in errors.items()}
    assert max(values.values()) < 1.15 * values["fast"]


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


@pytest.mark.parametrize("settings, message", [
    (dict(attn="cosine"), "attn is 'cosine' .*, not one of softmax, .*, diff_linear"),
    (dict(attn="diff", n_head=1), "n_head must be a multiple of 2, not 1"),
    (dict(n_embd=36), "n_embd must be a multiple of 8, not 36"),
    (dict(n_head=0), "n_head must be"),
])
def test_impossible_models_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny_model(**dict(attn="softmax") | settings)


def test_a_layer_follows_its_class_and_a_config_is_not_changed():
    size = dict(n_embd=64, n_head=8)
    layer = Diff(GPTConfig(**size), depth=3)  # though attn says softmax
    assert layer.subln.weight.tolist() == [1] * 16 and layer.lambda_init > 0.5
    assert SoftmaxAverage(GPTConfig("diff", **size), depth=0).subln is None
    assert DiffV2(GPTConfig("diff", **size), depth=0).q_proj.weight.shape == (128, 64)
    with pytest.raises(ValueError, match="n_head must be a multiple of 2, not 3"):
        Diff(GPTConfig(n_embd=24, n_head=3), depth=0)
    for attn in ("diff", "diff_v2"):
        config = GPTConfig(**TINY | dict(attn=attn))
        before = replace(config)
        GPT(config)
        assert config == before
        again = GPT(replace(config, attn="softmax"))
        assert [*again.state_dict()] == [*tiny_model("softmax").state_dict()]
        assert again.blocks[0].mlp.up_proj.out_features == 80


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


@pytest.mark.parametrize("attn", [*ARMS, "mean", "sparse", "gated"])
def test_a_new_model_guesses_and_everything_in_it_learns_and_runs_in_bf16(attn):
    model = tiny_model(attn)
    idx = random_tokens(4, 257)
    logits, loss = model(idx[:, :-1], idx[:, 1:])
    assert logits.shape == (4, 256, 97) and not logits.requires_grad
    assert loss.item() == pytest.approx(math.log(97), rel=0.08)
    loss.backward()
    for name, p in model.named_parameters():
        if attn != "mean" or not any(unused in name for unused in ("q_proj", "k_proj", "out_proj")):
            assert p.grad.abs().max() > 0, name
    assert model.bfloat16()(idx)[0].dtype == torch.bfloat16
    assert len(list(model.generate(idx, 3))) == 3


# ---- an arm of one's own

def test_who_writes_make_map_alone_gets_this_map():
    x = normal(2, 70, 32)
    for attn in ("sparse", "mixed"):
        layer = sharp_layer(attn)
        A = layer.map(x)
        softmax = sharp_layer("softmax").map(x)
        assert error(A, F.relu(softmax - 0.05)) < 1e-12
        y = (A @ layer.project(x)[2]).transpose(1, 2).flatten(2) @ layer.out_proj.weight.T
        assert error(layer(x), y) < 1e-12 < 0.1 < error(layer(x), sharp_layer("softmax")(x))
    for attn in ("diff_v2", "diff_linear"):  # of any arm
        class Half(ATTENTION[attn]):
            def make_map(self, *inputs):
                return super().make_map(*inputs) / 2

        layer = Half(GPTConfig(**TINY, subln=0.0), depth=1).double()
        whole = ATTENTION[attn](GPTConfig(**TINY, subln=0.0), depth=1).double()
        whole.load_state_dict(layer.state_dict())
        assert error(layer(x), whole(x) / 2) < 1e-12


def test_who_has_no_make_map_cannot_be_shown_another_arms():
    for attn in ("mean", "louder"):
        layer = tiny_model(attn).blocks[0].attn
        with pytest.raises(NotImplementedError, match=f"{type(layer).__name__} has no make_map"):
            layer.map(torch.zeros(1, 5, 32))
    with pytest.raises(NotImplementedError):
        by_map(layer, torch.zeros(1, 5, 32))


def test_a_forward_around_a_parents_keeps_its_forms():
    x = normal(2, 70, 32)
    gated, diff = sharp_layer("gated"), sharp_layer("diff")
    assert error(gated.map(x), diff.map(x)) < 1e-12
    assert error(gated(x), diff(x) * x.mean(-1, keepdim=True).sigmoid()) < 1e-12
    assert_below(errors_of_forms(gated, 70), 1e-10)


def test_a_text_that_goes_on_needs_its_rope():
    layer, state = sharp_layer("diff"), {}
    layer(normal(1, 5, 32), state=state)
    with pytest.raises(ValueError, match="needs the rope of its positions"):
        layer(normal(1, 5, 32), state=state)


def test_an_arm_without_a_state_takes_no_text_in_parts():
    for attn in STATELESS:
        model, state = tiny_model(attn), {}
        model(random_tokens(1, 5), state=state)
        with pytest.raises(ValueError, match=f"{attn} keeps no state"):
            model(random_tokens(1, 1), state=state)


# ---- compiling, sampling, saving

def losses_compiled_and_eager(attn, backend, device):
    """Of two lengths, one after the other."""
    torch.compiler.reset()
    model = tiny_model(attn, n_layer=1, n_embd=256).to(device)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    for T in (65, 64):
        idx = random_tokens(3, T).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = compiled(idx, idx)[1]
            yield loss.item(), model(idx, idx)[1].item()
        loss.backward()


@pytest.mark.parametrize("attn", ["diff", "diff_linear"])
def test_compiles_without_a_break_in_the_graph(attn):
    for compiled, eager in losses_compiled_and_eager(attn, "aot_eager", "cpu"):
        assert compiled == pytest.approx(eager, abs=1e-5)


@need_cuda
@each_arm
def test_compiles_on_a_gpu(attn):
    for compiled, eager in losses_compiled_and_eager(attn, "inductor", "cuda"):
        assert compiled == pytest.approx(eager, abs=2e-2)


@pytest.mark.parametrize("prompt", [1, 40])  # 40 is longer than the block
@pytest.mark.parametrize("attn", [*ARMS, *STATELESS, "gated"])
def test_greedy_tokens_equal_recomputation(attn, prompt):
    """Where the block is full, its newer half is read anew."""
    model = tiny_model(attn, block_size=16).double()
    with torch.no_grad():
        for p in model.blocks.parameters():
            p.mul_(2)  # so that the context speaks louder than the last token
    limit = 16
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
    model = tiny_model("diff_linear", kernel="flash_attn")
    model.save("a.pt", step=7)
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(Path, "replace", None)  # it ends before the new file gets the old one's name
        tiny_model("diff").save("a.pt", step=8)
    loaded = GPT.load("a.pt")
    assert loaded.config == tiny_model("diff_linear").config  # with SDPA
    assert loaded.extra == dict(step=7) and not loaded.training
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_what_was_trained_by_its_map_is_sampled_by_it():
    tiny_model("diff", kernel="map").save("a.pt")
    assert GPT.load("a.pt").config.kernel == "map"


def test_load_names_the_parameters_of_a_changed_class(monkeypatch):
    tiny_model("gated").save("a.pt")
    monkeypatch.setitem(ATTENTION, "gated", ATTENTION["diff_v2"])
    with pytest.raises(ValueError, match="a.pt can't be loaded: .*blocks.0.attn.lambda_proj"):
        GPT.load("a.pt")


def test_load_refuses_what_is_damaged_or_not_ours():
    class RunsCode:
        def __reduce__(self):
            return os.mkdir, ("boom",)

    tiny_model("diff").save("code", more=RunsCode())
    Path("cut").write_bytes(Path("code").read_bytes()[:-1000])
    torch.save(tiny_model("diff").state_dict(), "foreign")
    for name in ("code", "cut", "foreign"):
        with pytest.raises(ValueError, match=f"^{name} can't be loaded: it is damaged"):
            GPT.load(name)
    with pytest.raises(FileNotFoundError, match="missing"):
        GPT.load("missing")
    assert not Path("boom").exists()
