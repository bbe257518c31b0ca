"""
Right layers, as people write them, in several manners. They share no code with port/paper.py.

4 heads of two maps, C = 64, d = 8.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

INIT = 0.8 - 0.6 * math.exp(-0.3 * 3)  # of depth 3
VECTORS = ["lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"]


def tables(T, d, theta=10000.0):
    """Cosines and sines, (T, d/2)."""
    angle = torch.arange(T)[:, None] / theta ** (torch.arange(0, d, 2) / d)
    return angle.cos(), angle.sin()


def rotate_neighbours(x, cos, sin):
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def rotate_halves(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Right(nn.Module):
    """The paper's layer with Microsoft's names. kv: heads that have keys."""

    theta = 10000.0
    scale = 8**-0.5
    lambda_init = INIT

    def __init__(self, kv=4):
        super().__init__()
        self.kv = kv
        self.q_proj = nn.Linear(64, 64, bias=False)
        self.k_proj = nn.Linear(64, 16 * kv, bias=False)
        self.v_proj = nn.Linear(64, 16 * kv, bias=False)
        self.out_proj = nn.Linear(64, 64, bias=False)
        self.subln = nn.RMSNorm(16, eps=1e-5)
        for name in VECTORS:
            self.register_parameter(name, nn.Parameter(torch.randn(8) / 10))

    def forward(self, x):
        q, k, v = self.split(x)
        q, k = self.turn(q), self.turn(k)
        k, v = self.repeat(k, v)
        A = self.attention(q @ k.mT * self.scale)  # (B, 8, T, T)
        y = self.subtract(A, v)  # (B, 4, T, 16)
        return self.finish(y)

    def split(self, x):
        """q (B, 8, T, 8), k (B, 2 kv, T, 8), v (B, kv, T, 16)"""
        q = self.q_proj(x).unflatten(-1, (8, 8)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (-1, 16)).transpose(1, 2)
        return q, k, v

    def turn(self, m):
        return rotate_neighbours(m, *tables(m.shape[2], 8, self.theta))

    def repeat(self, k, v):
        times = 4 // self.kv
        k = k.unflatten(1, (-1, 2)).repeat_interleave(times, 1).flatten(1, 2)
        return k, v.repeat_interleave(times, 1)

    def attention(self, scores):
        return self.mask(scores).softmax(-1)

    def mask(self, scores):
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -math.inf)

    def lam(self):
        first = (self.lambda_q1 * self.lambda_k1).sum().exp()
        second = (self.lambda_q2 * self.lambda_k2).sum().exp()
        return first - second + self.lambda_init

    def subtract(self, A, v):
        return (A[:, 0::2] - self.lam() * A[:, 1::2]) @ v

    def finish(self, y):
        y = self.norm(y) * (1 - self.lambda_init)
        return self.out_proj(self.merge(y))

    def norm(self, y):
        return self.subln(y)

    def merge(self, y):
        return y.transpose(1, 2).reshape(y.shape[0], y.shape[2], 64)


# ---- right layers in other manners

class Fused(Right):
    """One projection for all, scaled_dot_product_attention, and a bias."""

    def __init__(self):
        super().__init__()
        del self.q_proj, self.k_proj, self.v_proj
        self.c_attn = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        q = self.turn(q.unflatten(-1, (8, 8)).transpose(1, 2))
        k = self.turn(k.unflatten(-1, (8, 8)).transpose(1, 2))
        v = v.unflatten(-1, (4, 16)).transpose(1, 2)
        first = F.scaled_dot_product_attention(q[:, 0::2], k[:, 0::2], v, is_causal=True)
        second = F.scaled_dot_product_attention(q[:, 1::2], k[:, 1::2], v, is_causal=True)
        return self.finish(first - self.lam() * second)


class Apart(Right):
    """A projection for each map, so the maps are in two blocks, and rotary by halves."""

    def __init__(self):
        super().__init__()
        del self.q_proj, self.k_proj, self.out_proj
        for name in ("wq1", "wq2", "wk1", "wk2"):
            setattr(self, name, nn.Linear(64, 32, bias=False))
        self.wo = nn.Linear(64, 64)

    def forward(self, x):
        v = self.v_proj(x).view(*x.shape[:2], 4, 16).transpose(1, 2)
        first = self.one_map(self.wq1(x), self.wk1(x)) @ v
        second = self.one_map(self.wq2(x), self.wk2(x)) @ v
        y = self.subln(first - self.lam() * second) * (1 - INIT)
        return self.wo(self.merge(y))

    def one_map(self, q, k):
        q = q.view(*q.shape[:2], 4, 8).transpose(1, 2)
        k = k.view(*k.shape[:2], 4, 8).transpose(1, 2)
        cos, sin = tables(q.shape[2], 8)
        return self.attention(rotate_halves(q, cos, sin) @ rotate_halves(k, cos, sin).mT / 8**0.5)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(64, 16, bias=False)
        self.key = nn.Linear(64, 16, bias=False)
        self.value = nn.Linear(64, 16, bias=False)

    def forward(self, x, lam):
        cos, sin = tables(x.shape[1], 8)
        maps = []
        for q, k in zip(self.query(x).chunk(2, -1), self.key(x).chunk(2, -1)):
            scores = rotate_neighbours(q, cos, sin) @ rotate_neighbours(k, cos, sin).mT / 8**0.5
            future = torch.full_like(scores[0], -math.inf).triu(1)
            maps.append((scores + future).softmax(-1))
        return (maps[0] - lam * maps[1]) @ self.value(x)


class ListOfHeads(Right):
    """A module for each head. It gives its maps as well."""

    def __init__(self):
        super().__init__()
        del self.q_proj, self.k_proj, self.v_proj
        self.heads = nn.ModuleList(Head() for _ in range(4))

    def forward(self, x):
        y = [self.subln(head(x, self.lam())) * (1 - INIT) for head in self.heads]
        return self.out_proj(torch.cat(y, -1)), None


class Transposed(nn.Module):
    """x @ W + b, as GPT-2's Conv1D."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 8)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class TransposedOutput(Right):
    def __init__(self):
        super().__init__()
        self.out_proj = Transposed(64, 64)


class AllTransposed(Right):
    def __init__(self):
        super().__init__()
        self.q_proj = Transposed(64, 64)
        self.k_proj = Transposed(64, 64)
        self.v_proj = Transposed(64, 64)
        self.out_proj = Transposed(64, 64)


class FusedTransposed(Fused):
    def __init__(self):
        super().__init__()
        self.c_attn = Transposed(64, 192)


class VectorsInTwo(Right):
    """lambda's vectors in two weights, whose names do not say lambda."""

    def __init__(self):
        super().__init__()
        for name in VECTORS:
            delattr(self, name)
        self.lq = nn.Parameter(torch.randn(2, 8) / 10)
        self.lk = nn.Parameter(torch.randn(2, 8) / 10)

    def lam(self):
        first, second = (self.lq * self.lk).sum(-1).exp()
        return first - second + self.lambda_init


class VectorsInOne(Right):
    """Here the last two rows are the first pair."""

    def __init__(self):
        super().__init__()
        for name in VECTORS:
            delattr(self, name)
        self.lambdas = nn.Parameter(torch.randn(4, 8) / 10)

    def lam(self):
        q2, k2, q1, k1 = self.lambdas
        return (q1 @ k1).exp() - (q2 @ k2).exp() + self.lambda_init


class VectorsInAList(VectorsInOne):
    def __init__(self):
        super().__init__()
        del self.lambdas
        self.lambdas = nn.ParameterList(torch.randn(8) / 10 for _ in range(4))


class VectorsWithOnes(Right):
    """lambda's vectors are (1, 1, 8)."""

    def __init__(self):
        super().__init__()
        for name in VECTORS:
            setattr(self, name, nn.Parameter(torch.randn(1, 1, 8) / 10))


class OneBlockForAll(Right):
    """W_q, W_k and W_v are one weight (3, 4, 2, 8, 64)."""

    def __init__(self):
        super().__init__()
        del self.q_proj, self.k_proj, self.v_proj
        self.qkv = nn.Parameter(torch.randn(3, 4, 2, 8, 64) / 8)

    def split(self, x):
        q, k, v = torch.einsum("btc,zhmdc->zbhmtd", x, self.qkv)
        return q.flatten(1, 2), k.flatten(1, 2), v.transpose(2, 3).flatten(3)


class OddOutput(Right):
    """The name of W_O tells nothing, and it is the only such one."""

    def __init__(self):
        super().__init__()
        del self.out_proj
        self.unify = nn.Linear(64, 64)

    def finish(self, y):
        return self.unify(self.merge(self.norm(y) * (1 - INIT)))


class NormForEachHead(Right):
    def __init__(self):
        super().__init__()
        del self.subln
        self.norms = nn.ModuleList(nn.RMSNorm(16, eps=1e-5) for _ in range(4))

    def norm(self, y):
        return torch.stack([norm(y[:, n]) for n, norm in enumerate(self.norms)], 1)


class GainForEachHead(Right):
    def __init__(self):
        super().__init__()
        del self.subln
        self.gain = nn.Parameter(torch.ones(4, 1, 16))

    def norm(self, y):
        return F.rms_norm(y, [16], eps=1e-5) * self.gain


class MaskedAfterwards(Right):
    """The rows of each map are divided once more by what is left of them, which is a mask, too.

    In inputs that are much larger this is 0 / 0, but no layer in float32 gets those.
    """

    def attention(self, scores):
        A = scores.softmax(-1).tril()
        return A / A.sum(-1, keepdim=True)


class Buffers(Right):
    """It can read 64 tokens."""

    def __init__(self):
        super().__init__()
        self.register_buffer("later", torch.ones(64, 64, dtype=torch.bool).triu(1))

    def mask(self, scores):
        T = scores.shape[-1]
        return scores.masked_fill(self.later[:T, :T], -math.inf)


class ComplexTable(Right):
    """Llama's manner: a complex table and a mask come from outside, and the output is alone."""

    def forward(self, x, freqs_cis, attn_mask):
        self.table = freqs_cis
        self.given = attn_mask
        return super().forward(x)

    def turn(self, m):
        pairs = torch.view_as_complex(m.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.table).flatten(-2)

    def mask(self, scores):
        return scores + self.given


class Version2(nn.Module):
    """DIFF V2. kv: heads that have keys."""

    def __init__(self, kv=4):
        super().__init__()
        self.kv = kv
        self.wq = nn.Linear(64, 128, bias=False)
        self.wk = nn.Linear(64, 16 * kv, bias=False)
        self.wv = nn.Linear(64, 16 * kv, bias=False)
        self.wo = nn.Linear(64, 64, bias=False)
        self.lambda_proj = nn.Linear(64, 4)

    def forward(self, x):
        cos, sin = tables(x.shape[1], 16)
        q = rotate_neighbours(self.wq(x).unflatten(-1, (8, 16)).transpose(1, 2), cos, sin)
        k = rotate_neighbours(self.wk(x).unflatten(-1, (-1, 16)).transpose(1, 2), cos, sin)
        v = self.wv(x).unflatten(-1, (-1, 16)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, *self.repeat(k, v), is_causal=True)  # (B, 8, T, 16)
        y = self.subtract(y, self.gate(x))
        return self.wo(y.transpose(1, 2).flatten(2))

    def repeat(self, k, v):
        return k.repeat_interleave(8 // self.kv, 1), v.repeat_interleave(8 // self.kv, 1)

    def gate(self, x):
        return self.lambda_proj(x).sigmoid().mT[..., None]

    def subtract(self, y, lam):
        return y[:, 0::2] - lam * y[:, 1::2]


def function(x, w):
    """A function of weights."""
    layer = Right()
    return torch.func.functional_call(layer, w, x)


# ---- right, but awkward

class HalfPrecision(Right):
    """q, k and v go through float16."""

    def split(self, x):
        return [m.half().float() for m in super().split(x)]

    def attention(self, scores):
        return super().attention(scores.half()).float()


class Autocast(Right):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class AutocastConstantInit(Autocast):
    lambda_init = 0.8


class SecondNorm(Right):
    """It has another norm, of the width of a head, which is never used."""

    def __init__(self):
        super().__init__()
        self.norm2 = nn.RMSNorm(16)


class WideSecondNorm(Right):
    """The norm that is never used is as wide as all heads."""

    def __init__(self):
        super().__init__()
        self.norm2 = nn.RMSNorm(64)


class Talkative(Right):
    def forward(self, x):
        print("shapes", x.shape)
        return super().forward(x)


class ZeroLambdas(Right):
    """The start of a converter: these vectors never leave 0."""

    def __init__(self):
        super().__init__()
        for name in VECTORS:
            nn.init.zeros_(getattr(self, name))


class LargeLambdas(Right):
    """The vectors start with std 1."""

    def __init__(self):
        super().__init__()
        for name in VECTORS:
            nn.init.constant_(getattr(self, name), 1.0 if name.endswith("1") else 0.5)


class LambdaForEachHead(Right):
    """And biases, and another eps: none of these is looked at, as each verdict says."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.out_proj = nn.Linear(64, 64), nn.Linear(64, 64)
        self.subln = nn.RMSNorm(16, eps=1e-3)
        for name in VECTORS:
            self.register_parameter(name, nn.Parameter(torch.randn(4, 8) / 10))

    def lam(self):
        first = (self.lambda_q1 * self.lambda_k1).sum(-1).exp()
        second = (self.lambda_q2 * self.lambda_k2).sum(-1).exp()
        return (first - second)[:, None, None] + self.lambda_init
