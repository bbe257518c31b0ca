"""
More kinds of attention: the controls of the lab.

    python train.py --use=lab.arms --attn=softmax,softmax_average
    python sample.py --use=lab.arms --prompt "Once upon a time"

Each is a class on the contract of model.Attention, and the table at the end has their names. Those
with decay have a make_map alone, so they are slow. Decay is ALiBi for softmax (arXiv 2108.12409)
and RetNet's retention for linear maps (2307.08621).
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import (
    ATTENTION, NORM_EPS, Attention, Diff, DiffV2, Linear, Softmax, features, linear_attention,
    linear_map, phi, rotate, softmax_attention, softmax_map, upcast,
)

# ---- minus the average of all tokens, in place of minus a second map

def average_map(A):
    """U, (T, T): the i-th token takes 1 / i from each one up to itself."""
    ones = torch.ones_like(A[0, 0]).tril()
    return ones / ones.sum(-1, keepdim=True)


def running_mean(v):
    """U V, the mean of the values so far, (B, h, T, d_v)."""
    return upcast(v).cumsum(2) / torch.arange(1, v.shape[2] + 1, device=v.device)[:, None]


class SoftmaxAverage(Attention):
    """A - lambda U, where A is softmax's, and lambda is learned."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.lambda_average = nn.Parameter(torch.tensor(0.2))  # diff's first lambda_init

    def lam(self, x):
        return self.lambda_average

    def make_map(self, q, k, x, rope):
        A = softmax_map(q, k, rope)
        return A - self.lam(x) * average_map(A)

    def attend(self, q, k, v, x, rope):
        y = softmax_attention(q, k, v, rope, self.config.kernel)
        return y - self.lam(x) * running_mean(v)


class LinearAverage(SoftmaxAverage):  # inherits its lambda. Both forms are replaced
    """A - lambda U, where A is a linear map."""

    def make_map(self, q, k, x, rope):
        A = linear_map(q, k, rope)
        return A - self.lam(x) * average_map(A)

    def attend(self, q, k, v, x, rope):
        return linear_attention(*features(q, k, rope), v) - self.lam(x) * running_mean(v)


class GatedAverage(SoftmaxAverage):
    """A - sigmoid(w . x) U: diff_v2 with the average in place of its second map.

    Its rows have the sums of diff_v2's, and A the same share of them.
    """

    def __init__(self, config, depth):
        super().__init__(config, depth)
        del self.lambda_average
        self.lambda_proj = nn.Linear(config.n_embd, self.h, bias=False)

    lam = DiffV2.lam


class SoftmaxOwn(SoftmaxAverage):
    """A - lambda I: each token takes away its own value, not the average."""

    def make_map(self, q, k, x, rope):
        A = softmax_map(q, k, rope)
        return A - self.lam(x) * torch.eye(A.shape[-1], device=A.device)

    def attend(self, q, k, v, x, rope):
        return softmax_attention(q, k, v, rope, self.config.kernel) - self.lam(x) * v


# ---- one map with diff's parts, and diff without them

class Norm(Attention):
    """An Attention with the output norm of Eq. 3: the last parent of a kind that gets the norm.

    Here the factor 1 - lambda_init behind the norm is 1.
    """

    lambda_init = 0.0

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.subln = nn.RMSNorm(config.n_embd // self.h, eps=NORM_EPS)  # all heads share its weight

    output = Diff.output


class SoftmaxNorm(Softmax, Norm):
    """One map with diff's norm, and no factor."""


class LinearNorm(Linear, Norm):
    """One linear map with diff's norm, and no factor."""


class SoftmaxFactor(SoftmaxNorm):
    """One map with diff's norm and, behind it, diff's factor 1 - lambda_init."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)  # as in Diff


class SoftmaxFactorSmall(SoftmaxNorm):
    """softmax_factor with a lambda_init of 0.8: its factor is 0.2 in each layer."""

    lambda_init = 0.8


class DiffConstant(Diff):
    """diff with a lambda_init of 0.8 in each layer, as in the paper's Table 6."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.lambda_init = 0.8


class DiffNormLow(Diff):
    """diff, whose norm's weight starts at 0.2."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        nn.init.constant_(self.subln.weight, 0.2)


class DiffNoNorm(Diff):
    """diff without Eq. 3: neither its norm nor its factor."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        del self.subln

    def output(self, y):
        return y


# ---- other signs and other sums

class SoftmaxSum(Diff):
    """(A_1 + |lambda| A_2) / (1 + |lambda|): two maps and no minus, with rows that sum to 1."""

    def lam(self, x):
        return -super().lam(x).abs()

    def make_map(self, q, k, x, rope):
        return super().make_map(q, k, x, rope) / (1 - self.lam(x))

    def attend(self, q, k, v, x, rope):
        return super().attend(q, k, v, x, rope) / (1 - self.lam(x))


class DiffV2FreeSign(DiffV2):
    """A_1 - lambda A_2, where lambda = tanh(w . x) starts at 0 and may be a plus."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        del self.lambda_proj  # a GPT would draw it
        self.lambda_w = nn.Parameter(torch.zeros(self.h, config.n_embd))

    def lam(self, x):
        return upcast(F.linear(x, self.lambda_w)).tanh().mT[..., None]  # (B, h, T, 1)


class DiffV2FreePlus(DiffV2):
    """A_1 + lambda A_2: diff_v2 with the other sign. Its rows sum to 1 + lambda."""

    def lam(self, x):
        return -super().lam(x)


class DiffV2SmallerPlus(DiffV2FreePlus):
    """(A_1 + lambda A_2) (1 - lambda) / (1 + lambda): the plus, with diff_v2's row sums."""

    def shrink(self, x):
        lam = -self.lam(x)
        return (1 - lam) / (1 + lam)

    def make_map(self, q, k, x, rope):
        return super().make_map(q, k, x, rope) * self.shrink(x)

    def attend(self, q, k, v, x, rope):
        return super().attend(q, k, v, x, rope) * self.shrink(x)


class Gate(Softmax):
    """A_ij sigmoid(w . x_i): one map, whose rows have a learned sum.

    It is diff_v2 without the second map: what is left of it are rows that don't sum to 1.
    """

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.gate_proj = nn.Linear(config.n_embd, self.h, bias=False)  # for each head and token

    def gate(self, x):
        return upcast(self.gate_proj(x)).sigmoid().mT[..., None]  # (B, H, T, 1)

    def make_map(self, q, k, x, rope):
        return softmax_map(q, k, rope) * self.gate(x)

    def attend(self, q, k, v, x, rope):
        return softmax_attention(q, k, v, rope, self.config.kernel) * self.gate(x)


class TwoGates(Gate):
    """sigmoid(a . x) A_1 + sigmoid(b . x) A_2, with diff_v2's two queries."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.q_proj = nn.Linear(config.n_embd, 2 * config.n_embd, bias=False)
        self.gate_proj = nn.Linear(config.n_embd, 2 * self.h, bias=False)  # for each map and token

    def make_map(self, q, k, x, rope):
        A = super().make_map(q, k, x, rope)  # (B, 2h, T, T)
        return A[:, 0::2] + A[:, 1::2]

    def attend(self, q, k, v, x, rope):
        y = super().attend(q, k, v, x, rope)  # (B, 2h, T, d_v)
        return y[:, 0::2] + y[:, 1::2]


# ---- decay

def decay_rates(layer):
    """1 / span of each map, (H, 1, 1). After `span` tokens a weight has faded to 1/e.

    The spans go from 4 tokens (a single head has 4) to 2 block_size, evenly in log.
    """
    log_span = torch.linspace(math.log2(4), math.log2(2 * layer.config.block_size), layer.h)
    return torch.exp2(-log_span)[:, None, None]


def log_decay(rates, T, device):
    """log D, (H, T, T): minus rate times the distance i - j, and -inf for the future."""
    i = torch.arange(T, device=device)
    distance = i[:, None] - i
    return (-rates.to(device) * distance).masked_fill(distance < 0, -math.inf)


def decaying_linear_map(q, k, rope, rates):
    """A_ij = (R_i phi(q_i)) . (R_j phi(k_j)) D_ij / z_i, (B, H, T, T). z_i: the sum without R."""
    q, k = phi(q), phi(k)
    D = log_decay(rates, q.shape[2], q.device).exp()  # (H, T, T)
    z = (upcast(q @ k.mT) * D).sum(-1, keepdim=True) + 1e-12
    return upcast(rotate(q, rope) @ rotate(k, rope).mT) * D / z


class SoftmaxDecay(Attention):
    """A = softmax(Q K^T / sqrt(d) + log D), where D decays with the distance."""

    def make_map(self, q, k, x, rope):
        scores = upcast(rotate(q, rope) @ rotate(k, rope).mT) / math.sqrt(self.d)
        return (scores + log_decay(decay_rates(self), q.shape[2], q.device)).softmax(-1)


class LinearDecay(Attention):
    """A linear map whose weights decay with the distance: decaying_linear_map."""

    def make_map(self, q, k, x, rope):
        return decaying_linear_map(q, k, rope, decay_rates(self))


class LinearOneShortHead(Attention):
    """linear: its first head has a span of 4 tokens, the others never forget."""

    def make_map(self, q, k, x, rope):
        rates = torch.tensor([1 / 4] + [0] * (self.h - 1))[:, None, None]
        return decaying_linear_map(q, k, rope, rates)


ATTENTION.update(
    softmax_average=SoftmaxAverage,
    linear_average=LinearAverage,
    gated_average=GatedAverage,
    softmax_own=SoftmaxOwn,
    softmax_norm=SoftmaxNorm,
    linear_norm=LinearNorm,
    softmax_factor=SoftmaxFactor,
    softmax_factor_small=SoftmaxFactorSmall,
    diff_constant=DiffConstant,
    diff_norm_low=DiffNormLow,
    diff_no_norm=DiffNoNorm,
    softmax_sum=SoftmaxSum,
    diff_v2_free_sign=DiffV2FreeSign,
    diff_v2_free_plus=DiffV2FreePlus,
    diff_v2_smaller_plus=DiffV2SmallerPlus,
    gate=Gate,
    two_gates=TwoGates,
    softmax_decay=SoftmaxDecay,
    linear_decay=LinearDecay,
    linear_one_short_head=LinearOneShortHead,
)
