"""Layers with a slip or two, as people write them. They share no code with port/mistakes.py."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from port.tests.right_layers import INIT, VECTORS, AllTransposed, Right, VectorsInOne, Version2
from port.tests.right_layers import rotate_halves, rotate_neighbours, tables


class GroupNormOverTime(Right):
    """As in the code of a paper: nn.GroupNorm takes (B, C, T)."""

    def __init__(self):
        super().__init__()
        del self.subln
        self.group_norm = nn.GroupNorm(4, 64)

    def norm(self, y):
        B, h, T, c = y.shape
        y = self.group_norm(y.transpose(2, 3).reshape(B, h * c, T))
        return y.unflatten(1, (h, c)).transpose(2, 3)


class CountsFromOne(GroupNormOverTime):
    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * 4)


class NoMask(Right):
    def mask(self, scores):
        return scores


class NoMaskAndScale(NoMask):
    scale = 16**-0.5


class NoMaskAndBothMapsTurned(NoMask):
    def turn(self, m):
        both = m.unflatten(1, (-1, 2)).transpose(2, 3).flatten(3)  # (B, 4, T, 16)
        both = rotate_halves(both, *tables(m.shape[2], 16))
        return both.unflatten(-1, (2, 8)).transpose(2, 3).flatten(1, 2)


class BooleanMaskAdded(Right):
    """As in a public judge: the mask is boolean, and += takes True for 1."""

    def mask(self, scores):
        mask = torch.ones_like(scores[0, 0]).triu(1) == 1
        scores += mask
        return scores


class MaskOnFirstMap(Right):
    def mask(self, scores):
        masked = super().mask(scores)
        masked[:, 1::2] = scores[:, 1::2]
        return masked


class MaskAfterSoftmax(Right):
    """-inf is put in after the softmax."""

    def attention(self, scores):
        return self.mask(scores.softmax(-1))


class OffByOne(Right):
    def mask(self, scores):
        hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(2)
        return scores.masked_fill(hidden, -math.inf)


class LateLeak(Right):
    """It works in pieces of 16 tokens, and forgot the mask within the later ones."""

    def mask(self, scores):
        i = torch.arange(scores.shape[-1])
        hidden = i[None, :] > i[:, None]
        hidden &= ~((i[None, :] // 16 == i[:, None] // 16) & (i[:, None] >= 16))
        return scores.masked_fill(hidden, -math.inf)


class SoftmaxTwice(Right):
    def subtract(self, A, v):
        A = A[:, 0::2] - self.lam() * A[:, 1::2]
        return self.mask(A).softmax(-1) @ v


class MaskBetweenTwoSoftmaxes(Right):
    def attention(self, scores):
        return scores.softmax(-1)

    def subtract(self, A, v):
        A = A[:, 0::2] - self.lam() * A[:, 1::2]
        return self.mask(A).softmax(-1) @ v


class ValuesTiled(Right):
    """All 8 maps go through one SDPA, and the values are repeated in the wrong order."""

    def subtract(self, A, v):
        y = A @ v.repeat(1, 2, 1, 1)
        return y[:, 0::2] - self.lam() * y[:, 1::2]


class MapsReadAsTokens(Right):
    def split(self, x):
        q, k, v = super().split(x)
        return self.reread(q), self.reread(k), v

    def reread(self, m):
        B, _, T, d = m.shape
        m = m.reshape(B, 4, T, 2, d)
        return m.transpose(2, 3).flatten(1, 2)


class ValuesApart(Right):
    """As an agent writes it: heads as usual, for values, too, which are subtracted in pairs."""

    def __init__(self):
        super().__init__()
        self.out_proj = nn.Linear(32, 64, bias=False)
        self.subln = nn.RMSNorm(8, eps=1e-5)

    def subtract(self, A, v):
        v = v.unflatten(-1, (2, 8)).transpose(2, 3).flatten(1, 2)  # (B, 8, T, 8)
        y = A @ v
        return y[:, 0::2] - self.lam() * y[:, 1::2]


class ValuesApartNoMask(ValuesApart):
    def mask(self, scores):
        return scores


class SizesOfNoOther(ValuesApartNoMask):
    """Half of its output is left away, so its weights have the sizes of no layer on the list."""

    def __init__(self):
        super().__init__()
        self.out_proj = nn.Linear(16, 64, bias=False)

    def merge(self, y):
        return super().merge(y)[..., ::2]


class NarrowValues(Right):
    """Values are d wide."""

    def __init__(self):
        super().__init__()
        self.v_proj = nn.Linear(64, 32, bias=False)
        self.out_proj = nn.Linear(32, 64, bias=False)
        self.subln = nn.RMSNorm(8, eps=1e-5)


class HeadsNotTransposed(Right):
    def split(self, x):
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, 4, T, 16)
        k = self.k_proj(x).view(B, 4, T, 16)
        v = self.v_proj(x).view(B, 4, T, 16)
        return self.to_maps(q), self.to_maps(k), v

    def to_maps(self, m):
        first, second = m.chunk(2, dim=-1)
        return torch.stack((first, second), 2).flatten(1, 2)


class MergeNotTransposed(Right):
    def merge(self, y):
        return y.reshape(y.shape[0], y.shape[2], 64)


class RepeatedBeforeSplit(Right):
    """As in Microsoft's naive file."""

    def __init__(self):
        super().__init__(kv=2)

    def repeat(self, k, v):
        return k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)


class NoNorm(Right):
    """It is built, and never used."""

    def norm(self, y):
        return y


class NormOverAllHeads(Right):
    def __init__(self):
        super().__init__()
        self.subln = nn.LayerNorm(64)

    def finish(self, y):
        return self.out_proj(self.subln(self.merge(y)) * (1 - INIT))


class NormAfterOutProj(Right):
    def __init__(self):
        super().__init__()
        self.subln = nn.LayerNorm(64)

    def finish(self, y):
        return self.subln(self.out_proj(self.merge(y)))


class NoRotary(Right):
    def turn(self, m):
        return m


class Theta(Right):
    theta = 500000.0


class TableTooWide(Right):
    """The table was made for 16 channels, and its first half is used."""

    def turn(self, m):
        cos, sin = tables(m.shape[2], 16)
        return rotate_neighbours(m, cos[:, :4], sin[:, :4])


class HalfRotary(Right):
    def turn(self, m):
        turned = rotate_halves(m[..., :4], *tables(m.shape[2], 4))
        return torch.cat((turned, m[..., 4:]), -1)


class RotaryOnOneMap(Right):
    def turn(self, m):
        maps = m.unflatten(1, (-1, 2)).clone()
        maps[:, :, 0] = super().turn(maps[:, :, 0])
        return maps.flatten(1, 2)


class QueriesAhead(Right):
    """As where a cache counts its tokens once too often. By halves."""

    def split(self, x):
        q, k, v = super().split(x)
        T = q.shape[2]
        cos, sin = tables(T + 1, 8)
        return rotate_halves(q, cos[1:], sin[1:]), rotate_halves(k, cos[:T], sin[:T]), v

    def turn(self, m):
        return m


class NormBeforeSubtraction(Right):
    def subtract(self, A, v):
        return self.subln(A[:, 0::2] @ v) - self.lam() * self.subln(A[:, 1::2] @ v)

    def norm(self, y):
        return y


class QKNorm(Right):
    def turn(self, m):
        return super().turn(F.rms_norm(m, m.shape[-1:]))


class ConstantInit(Right):
    lambda_init = 0.8


class NextLayersInit(Right):
    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * 4)


class NoFactor(Right):
    def finish(self, y):
        return self.out_proj(self.merge(self.subln(y)))


class LambdaIsANumber(Right):
    """Its vectors are there, and not used."""

    def lam(self):
        return INIT


class DetachedAsItTrains(Right):
    def lam(self):
        return super().lam().detach() if self.training else super().lam()


class LambdaOfAScalar(Right):
    def __init__(self):
        super().__init__()
        for name in VECTORS:
            delattr(self, name)
        self.lambda_param = nn.Parameter(torch.tensor(0.5))

    def lam(self):
        return self.lambda_param


class VectorsInOneOfAnotherForm(VectorsInOne):
    def lam(self):
        return self.lambdas.sum(-1).exp().mean()


class UnknownWeights(Right):
    """Nothing says what these are."""

    def __init__(self):
        super().__init__()
        self.thing = nn.Parameter(torch.randn(4, 1, 16))
        self.stuff = nn.Parameter(torch.randn(4, 1, 16))

    def norm(self, y):
        return super().norm(y) * self.thing + self.stuff


class Greek(Right):
    def __init__(self):
        super().__init__()
        self.γ = nn.Parameter(torch.ones(64))


class WideOutput(Right):
    """out_proj has all heads twice."""

    def __init__(self):
        super().__init__()
        self.out_proj = nn.Linear(128, 64)

    def merge(self, y):
        return super().merge(y).repeat(1, 1, 2)


class PlusForMinus(Right):
    def subtract(self, A, v):
        return (A[:, 0::2] + self.lam() * A[:, 1::2]) @ v


class LambdaBelowOne(Right):
    def lam(self):
        return super().lam().clamp(max=1)


class LambdaAboveZero(Right):
    def lam(self):
        return super().lam().relu()


class RowsSumToOne(Right):
    """The norm behind it hides the size of rows, and not their sign."""

    def subtract(self, A, v):
        return super().subtract(A, v) / (1 - self.lam())


class Window(Right):
    """A token sees 100 tokens."""

    def mask(self, scores):
        too_early = torch.ones_like(scores[0, 0], dtype=torch.bool).tril(-100)
        return super().mask(scores).masked_fill(too_early, -math.inf)


class ExpOverflows(Right):
    """exp in float16, and the maximum is not taken off."""

    def attention(self, scores):
        weights = scores.half().exp().tril()
        return (weights / weights.sum(-1, keepdim=True)).float()


class ScoresOverflow(Right):
    """Scores in float16 are scaled after the product."""

    scale = 1.0

    def attention(self, scores):
        return (self.mask(scores * 400).half() / 400 * 8**-0.5).softmax(-1).float()


class SameMapTwice(Right):
    """The second map is made of the first one's queries and keys."""

    def subtract(self, A, v):
        return (A[:, 0::2] - self.lam() * A[:, 0::2]) @ v


class SameMapTwiceTransposed(AllTransposed):
    def subtract(self, A, v):
        return (A[:, 0::2] - self.lam() * A[:, 0::2]) @ v


class OverHeads(Right):
    """No transpose: heads attend to heads."""

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (8, 8))  # (B, T, 8, 8)
        k = self.k_proj(x).unflatten(-1, (8, 8))
        v = self.v_proj(x).unflatten(-1, (4, 16)).repeat_interleave(2, 2)
        y = (q @ k.mT * self.scale).softmax(-1) @ v  # (B, T, 8, 16)
        y = self.subln(y[:, :, 0::2] - self.lam() * y[:, :, 1::2]) * (1 - INIT)
        return self.out_proj(y.flatten(2))


class TimeFirst(Right):
    """(T, B, C) is expected."""

    def forward(self, x):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Noisy(Right):
    def merge(self, y):
        return super().merge(y) + 0.1 * torch.randn(64)


class DropoutAlwaysOn(Right):
    def merge(self, y):
        return F.dropout(super().merge(y), 0.1)


class FlashDiffers(Right):
    """A switch of forward's that gives something else."""

    def forward(self, x, use_flash=False):
        self.scale = 16**-0.5 if use_flash else 8**-0.5
        return super().forward(x)


class EvalDiffers(Right):
    def merge(self, y):
        y = super().merge(y)
        return y if self.training else 2 * y


class NormInVersion2(Version2):
    def subtract(self, y, lam):
        return F.rms_norm(super().subtract(y, lam), (16,), eps=1e-5)


class GateWithoutSigmoid(Version2):
    def gate(self, x):
        return self.lambda_proj(x).mT[..., None]


class PairsByChunks(Version2):
    def subtract(self, y, lam):
        return y[:, :4] - lam * y[:, 4:]


# ---- no differential attention, or not alone

class PlainSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(64, 192)
        self.c_proj = nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = [m.unflatten(-1, (8, 8)).transpose(1, 2) for m in self.c_attn(x).chunk(3, -1)]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Right()
        self.norm = nn.RMSNorm(64)
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.fc(x)


class Residual(Right):
    def forward(self, x):
        return x + super().forward(x)


class NumpyLayer:
    def __call__(self, x):
        return x
