"""
What holds of model.py: `pytest test_model.py`.

Most tests take one attention layer in float64. Those on cuda are skipped where there is no GPU.
"""
import copy
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from check_arm import check_arm
from model import ATTENTION, GPT, Attention, Block, Diff, DiffLinear, GPTConfig, Refused, Softmax
from model import linear_attention, linear_map, make_rope, next_token, phi, rotate
from model import softmax_attention, softmax_map
from tests import equations

torch.set_num_threads(1)  # on tensors this small, threads only wait for one another

ARMS = ["softmax", "diff", "diff_v2", "linear", "diff_linear"]
SIZES = [1, 2, 63, 64, 65, 200]  # around a chunk
TINY = dict(block_size=256, vocab_size=97, n_layer=2, n_head=4, n_embd=32)
each_arm = pytest.mark.parametrize("attn", ARMS)
need_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


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


def error(a, b, least=1.0):
    """Of a, relative to the size of b, or to the least size if that is larger."""
    a, b = a.double().cpu(), b.double().cpu()
    return ((a - b).norm() / max(b.norm(), least)).item()


# ---- the two forms of a layer, and the equations of the papers

@each_arm
def test_a_layer_is_the_papers_equations(attn):
    layer = sharp_layer(attn, scale=30.0)
    x = 0.1 * normal(2, 13, 32)  # small, so that the norm's epsilon counts
    weight = {name: p.numpy(force=True) for name, p in layer.named_parameters()}
    found = equations.layer(attn, weight, x.numpy(), layer.config.n_head, depth=1)
    assert error(layer.map(x), torch.from_numpy(found["A"])) < 1e-12
    assert error(layer(x), torch.from_numpy(found["y"])) < 1e-12


def value_and_gradients(layer, x, kernel):
    layer.config.kernel = kernel
    x = x.detach().requires_grad_()
    y = layer(x)
    loss = (y * normal(*y.shape, seed=1).to(y.device)).sum()
    return y, *torch.autograd.grad(loss, [x, *layer.parameters()])


def assert_forms_agree(layer, T, bound, dtype=torch.float64, device="cpu"):
    """attend and the map have the map's values and gradients in float64. bf16 is autocast."""
    x = normal(2, T, layer.config.n_embd)
    y, *gradients = value_and_gradients(layer, x, "map")
    least = gradients[0].norm()  # a lambda's may be near 0, a sum of large terms
    layer = copy.deepcopy(layer).to(device, torch.promote_types(dtype, torch.float32))
    x = x.to(device, layer.q_proj.weight.dtype)
    for kernel in ("map", "sdpa"):
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            found, *of_gradients = value_and_gradients(layer, x, kernel)
        assert error(found, y) < bound, kernel
        for a, b in zip(of_gradients, gradients, strict=True):
            assert error(a, b, least) < 2 * bound, kernel


@each_arm
@pytest.mark.parametrize("T", SIZES)
def test_attend_is_the_map_times_V(attn, T):
    assert_forms_agree(sharp_layer(attn), T, 1e-10)


@each_arm
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=need_cuda)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_precision_of_both_forms(attn, dtype, device):
    """A rounding errs by up to u, on average by u / sqrt(3), and from x to y there are some 8 in a
    row: with random signs 1.6 u. The difference of two maps enlarges that, if they are alike, by up
    to 2 sqrt(1 + lambda^2) / (1 - lambda), here 3.3: 6 u. In float32 a sum is rounded at each of
    its 256 terms: sqrt(256) times that. The gradients go there and back: twice that.
    """
    bound = 6 * 2**-9 if dtype == torch.bfloat16 else 6 * 2**-24 * 16
    assert_forms_agree(sharp_layer(attn, scale=1.0, n_embd=256), 200, bound, dtype, device)


@each_arm
def test_nothing_sees_the_future(attn):
    """The loss of a token has no gradient in a later one's embedding."""
    model = tiny_model(attn).double()
    x = normal(1, 130, 32).requires_grad_()
    for position in (0, 63, 64, 100):
        y, rope = x, make_rope(model.config, 130, "cpu", x.dtype)
        for block in model.blocks:
            y = block(y, rope)
        (gradient,) = torch.autograd.grad(y[0, position].sum(), x)
        assert gradient[0, position + 1 :].abs().max() == 0
        assert gradient[0, : position + 1].abs().min() > 0


@pytest.mark.parametrize("attn", ["softmax", "diff", "diff_v2"])
def test_the_package_flash_attn_is_given_what_it_wants(attn, monkeypatch):
    def stand_in(q, k, v, softmax_scale, causal):  # (B, T, H, d), all of one width
        assert q.shape == k.shape == v.shape and causal
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * softmax_scale
        is_future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        A = scores.masked_fill(is_future, -math.inf).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", A, v)

    layer = sharp_layer(attn)
    x = normal(2, 65, 32)
    expected = layer(x)
    layer.config.kernel = "flash_attn"
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=stand_in))
    assert error(layer(x), expected) < 1e-12


def test_linear_attention_is_a_recurrent_net():
    """2006.16236, Eq. 18 to 20: a state that does not grow, to which each token adds."""
    q, k, v = [normal(2, 3, 130, 8, seed=i) for i in range(3)]
    S, outputs = 0, []
    for i in range(130):
        S = S + k[:, :, i, :, None] * v[:, :, i, None, :]
        outputs.append((q[:, :, i, None, :] @ S).squeeze(2))
    assert error(linear_attention(q, k, v), torch.stack(outputs, dim=2)) < 1e-12


@need_cuda
def test_a_gpus_gradients_are_right_in_any_layout():
    """One after the other in one process: see OneLayout."""
    q, k, v = [normal(2, 4, 256, 64, seed=i).to("cuda", torch.bfloat16) for i in range(3)]
    rope = make_rope(GPTConfig(), 256, "cuda", q.dtype)
    dy = normal(2, 256, 4, 64, seed=3).to("cuda", torch.bfloat16).transpose(1, 2)
    gradients = []
    for layout in (dy, dy.contiguous()):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        gradients.append(torch.autograd.grad(softmax_attention(*inputs, rope), inputs, layout))
    for one, other in zip(*gradients):
        assert error(one, other) < 1e-2


@pytest.mark.filterwarnings("ignore:.*kernel")
def test_no_kernel_holds_the_map_in_silence():
    x = normal(1, 2, 8, 5).mT  # its channels are apart in memory: no fused kernel takes that
    no_turn = (torch.ones(5, 4), torch.zeros(5, 4))
    with pytest.raises(RuntimeError, match="No (viable|available)"):
        softmax_attention(normal(1, 2, 5, 8), normal(1, 2, 5, 8), x, no_turn)


def test_a_row_whose_features_are_all_0_is_no_nan():
    layer = sharp_layer("linear").float()
    x = -1e3 * layer.q_proj.weight.pinverse().sum(1).detach()  # all queries are very negative
    assert layer(x.expand(1, 3, 32)).isfinite().all()


def test_phi_keeps_its_tail_in_bf16():
    x = torch.tensor([-20.0, -7.5, 0.0, 2.0], dtype=torch.bfloat16)
    assert phi(x).tolist() == pytest.approx([math.exp(-20), math.exp(-7.5), 1, 3], rel=1e-2)


# ---- check_arm, which train.py asks before a run

class NoMask(Attention):
    def make_map(self, q, k, x, rope):
        return (rotate(q, rope) @ rotate(k, rope).mT).softmax(-1)


class LeaksInChunks(Attention):
    """Chunks of 64 tokens, in which somebody has forgotten the tril."""

    def make_map(self, q, k, x, rope):
        chunk = torch.arange(q.shape[2]) // 64
        return (q @ k.mT).masked_fill(chunk[:, None] < chunk, -math.inf).softmax(-1)


class Prefix(Attention):
    """The first 64 tokens see one another, as in a prefix-LM."""

    def make_map(self, q, k, x, rope):
        i = torch.arange(q.shape[2])
        is_future = (i > i[:, None]) & (i >= 64)
        return (q @ k.mT).masked_fill(is_future, -math.inf).softmax(-1)


class LateLeak(Attention):
    """From token 200 on it sees all."""

    def make_map(self, q, k, x, rope):
        A = softmax_map(q, k, rope)
        late = (torch.arange(A.shape[-1]) >= 200)[:, None]
        return torch.where(late, torch.full_like(A, 1 / A.shape[-1]), A)


class MeanOverTime(Attention):
    def forward(self, x, rope=None):
        return self.v_proj(x.mean(1, keepdim=True).expand_as(x))


class MixesTheBatch(Diff):
    def lam(self, x):
        return x[..., :1].mean((0, 2)).sigmoid()[None, None, :, None]


class Contradiction(Softmax):
    """Its attend is softmax's, and not its map's."""

    def make_map(self, q, k, x, rope):
        return softmax_map(q, k, rope) / 2


class FarWindow(Softmax):
    """Its map ends after 200 tokens, and its attend does not."""

    def make_map(self, q, k, x, rope):
        A = softmax_map(q, k, rope)
        return A - A.tril(-200)


class WrongInTheLastLayer(Softmax):
    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.is_first = depth == 0

    def make_map(self, q, k, x, rope):
        A = softmax_map(q, k, rope)
        return A if self.is_first else A / 2


class PooledKeys(Softmax):
    """Neighbouring tokens have one key: the mean of both."""

    def project(self, x):
        q, k, v = super().project(x)
        pairs = F.pad(k, (0, 0, 0, k.shape[2] % 2)).unflatten(2, (-1, 2)).mean(3)
        return q, pairs.repeat_interleave(2, dim=2)[:, :, : k.shape[2]], v


class LeaksInTraining(Softmax):
    """A BatchNorm over all tokens, as it computes while it trains."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.batch_norm = torch.nn.BatchNorm1d(config.n_embd)

    def project(self, x):
        return super().project(self.batch_norm(x.mT).mT)


class MixesInTraining(Softmax):
    def project(self, x):
        return super().project(x - x.mean(0, keepdim=True) if self.training else x)


class ContradictsInTraining(Softmax):
    def attend(self, *args):
        return super().attend(*args) * (2 if self.training else 1)


class ZeroAtFirst(DiffLinear):
    """The fold has a wrong sign, which a gate of 0 hides in a new model."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.gate = torch.nn.Parameter(torch.zeros(()))

    def lam(self, x):
        return self.gate

    def make_map(self, q, k, x, rope):
        A = linear_map(q, k, rope)
        return A[:, 0::2] + self.lam(x) * A[:, 1::2]


class NotANumber(Attention):
    def make_map(self, q, k, x, rope):
        A = F.relu(softmax_map(q, k, rope) - 0.5)
        return A / A.sum(-1, keepdim=True)


@pytest.mark.parametrize("arm, says", [
    (NoMask, "sees later tokens"),
    (LeaksInChunks, "sees later tokens"),
    (Prefix, "sees later tokens"),
    (LateLeak, "sees later tokens"),
    (MeanOverTime, "sees later tokens"),
    (PooledKeys, "sees later tokens"),
    (LeaksInTraining, "sees later tokens while it trains"),
    (NotANumber, "makes numbers that are not finite"),
    (MixesTheBatch, "mixes the texts of a batch"),
    (MixesInTraining, "mixes the texts of a batch while it trains"),
    (Contradiction, "has an attend that is not make_map times V"),
    (ContradictsInTraining, "has an attend that is not make_map times V while it trains"),
    (ZeroAtFirst, "has an attend that is not make_map times V"),
    (FarWindow, "has an attend that is not make_map times V"),
    (WrongInTheLastLayer, "has an attend that is not make_map times V"),
])
def test_a_faulty_attention_is_found(arm, says, monkeypatch):
    monkeypatch.setitem(ATTENTION, "mine", arm)
    for block_size in (256, 257):
        with pytest.raises(Refused, match=f"^mine {says}"):
            check_arm(GPTConfig(**TINY | dict(attn="mine", block_size=block_size)))


def test_kernel_map_trains_the_map_so_the_map_is_checked(monkeypatch):
    class Leaks(Softmax):
        def make_map(self, q, k, x, rope):
            return softmax_map(q, k, rope).mT

    config = GPTConfig(**TINY | dict(attn="mine", kernel="map"))
    monkeypatch.setitem(ATTENTION, "mine", Leaks)
    with pytest.raises(Refused, match="mine sees later tokens"):
        check_arm(config)
    monkeypatch.setitem(ATTENTION, "mine", Contradiction)
    check_arm(config)  # its map is sound


SHARED = torch.nn.Parameter(torch.ones(()))  # of all layers


class Sparse(Attention):
    """A make_map alone is enough."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.shared = SHARED

    def make_map(self, q, k, x, rope):
        return F.relu(softmax_map(q, k, rope) - 0.05)


class Grouped(Attention):
    """Half as many keys and values as queries, and dropout: no more is needed than this."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.k_proj = torch.nn.Linear(config.n_embd, config.n_embd // 2, bias=False)
        self.v_proj = torch.nn.Linear(config.n_embd, config.n_embd // 2, bias=False)

    def project(self, x):
        q, k, v = [proj(x).unflatten(-1, (-1, self.d)).transpose(1, 2)
                   for proj in (self.q_proj, self.k_proj, self.v_proj)]
        return q, k, F.dropout(v, 0.1, self.training)

    def make_map(self, q, k, x, rope):
        return softmax_map(q, k, rope)


@pytest.mark.parametrize("attn", [*ARMS, "sparse", "grouped"])
def test_a_sound_attention_passes(attn, monkeypatch):
    monkeypatch.setitem(ATTENTION, "sparse", Sparse)
    monkeypatch.setitem(ATTENTION, "grouped", Grouped)
    for block_size in (1, 256):
        check_arm(GPTConfig(**TINY | dict(attn=attn, block_size=block_size)))
    assert SHARED.item() == 1 and SHARED.dtype == torch.float32  # it has checked copies


# ---- the parameters and their first values

FIRST = dict(softmax=222.654524, diff=270.562823, diff_v2=237.416492)
FIRST |= dict(linear=222.654524, diff_linear=270.562823)


def test_parameters_are_those_of_microsofts_release():
    """MultiheadDiffAttn(embed_dim=32, num_heads=2) of github.com/microsoft/unilm"""
    shapes = {name: tuple(p.shape) for name, p in sharp_layer("diff").named_parameters()}
    matrices = {f"{name}_proj.weight": (32, 32) for name in ("q", "k", "v", "out")}
    vectors = {f"lambda_{name}": (8,) for name in ("q1", "k1", "q2", "k2")}
    assert shapes == {**matrices, **vectors, "subln.weight": (16,)}


@pytest.mark.parametrize("size", [dict(n_head=4, n_embd=128), {}])
def test_all_have_as_many_parameters(size):
    count = {}
    for attn in ARMS:
        config = GPTConfig(**size | dict(attn=attn))
        count[attn] = sum(p.numel() for p in Block(config, depth=0).parameters())
    assert count["softmax"] == count["linear"] == count["diff_v2"]
    vectors = 6 * config.n_embd // config.n_head  # four of d, and a norm of 2d
    assert count["diff"] == count["diff_linear"] == count["softmax"] + vectors


@each_arm
def test_shared_parameters_start_with_the_same_bits(attn):
    """And with those of commit 6d48cee, so that its runs can be compared with those of today."""
    softmax = tiny_model("softmax").state_dict()
    total = 0
    for name, p in tiny_model(attn).state_dict().items():
        total += p.double().flatten() @ torch.linspace(1, 2, p.numel(), dtype=torch.float64)
        if name in softmax and p.shape == softmax[name].shape:
            assert torch.equal(p, softmax[name]), name
    assert total.item() == pytest.approx(FIRST[attn], abs=1e-4)


@each_arm
def test_a_new_model_guesses_and_everything_in_it_learns_and_runs_in_bf16(attn):
    model = tiny_model(attn)
    idx = torch.randint(97, (4, 257), generator=torch.Generator().manual_seed(0))
    logits, loss = model(idx[:, :-1], idx[:, 1:])
    assert logits.shape == (4, 256, 97) and not logits.requires_grad
    assert loss.item() == pytest.approx(math.log(97), rel=0.08)
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad.abs().max() > 0, name
    assert model.bfloat16()(idx)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("attn, device", [("diff", "cpu"), ("diff_linear", "cpu"),
                         *[pytest.param(attn, "cuda", marks=need_cuda) for attn in ARMS]])
def test_compiles_without_a_break_in_the_graph(attn, device):
    torch.compiler.reset()
    model = tiny_model(attn, n_layer=1, n_embd=256).to(device)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    for T in (65, 64):
        idx = torch.randint(97, (3, T), device=device)
        assert compiled(idx, idx)[1].item() == pytest.approx(model(idx, idx)[1].item(), abs=1e-3)


# ---- sampling and saving

def test_choices_follow_temperature_and_top_k():
    probs = torch.tensor([0.15, 0.5, 0.05, 0.3])
    likeliest = torch.tensor([0.0, 1, 0, 0])
    for temperature, top_k, expected in [
        (1.0, None, probs), (0.5, None, probs**2 / 0.365), (0.0, None, likeliest),
        (1.0, 2, torch.tensor([0, 0.625, 0, 0.375])),
    ]:
        generator = torch.Generator().manual_seed(0)
        chosen = next_token(probs.log().expand(20_000, -1), temperature, top_k, generator)
        assert error(chosen.flatten().bincount(minlength=4) / 20_000, expected) < 0.02


def test_a_checkpoint_gives_the_model_and_its_samples_back(tmp_path, monkeypatch):
    model = tiny_model("diff_linear", block_size=16)
    model.save(tmp_path / "a.pt", step=7)
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(Path, "replace", None)  # it ends before the new file gets the old one's name
        tiny_model("diff").save(tmp_path / "a.pt", step=8)
    loaded, extra = GPT.load(tmp_path / "a.pt")
    assert loaded.config == model.config and extra == dict(step=7) and not loaded.training
    model.config.kernel = "flash_attn"
    model.save(tmp_path / "b.pt")
    model.config.kernel = GPT.load(tmp_path / "b.pt")[0].config.kernel
    assert model.config.kernel == "sdpa"  # any machine can sample
    idx = torch.arange(40)[None]  # longer than a block
    tokens = [[t.item() for t in m.generate(idx, 9, temperature=0)] for m in (model, loaded)]
    assert tokens[0] == tokens[1]
    assert tokens[0][0] == model(idx[:, -16:])[0].argmax()
