"""
Arms of one's own: the controls of the lab, with a line each in the table at the end.

    python -m lab.arms --attn=linear_decay    # trains one. With --prompt it samples

Decay is ALiBi for softmax (arXiv 2108.12409) and RetNet's retention for the linear arms
(2307.08621). It has the plain T x T form, fast enough for the toy and too slow for long texts. It
has no state to sample from, so each new token reads the whole text again.
"""
import math
import sys

import torch
import torch.nn as nn

import sample
import train
from model import ATTENTION, GPT, Diff, DiffV2, Linear, Softmax, SoftmaxAverage
from model import for_each_map, rotate, upcast


def decay_rates(layer):
    """1 / span of each map, (H, 1, 1). After `span` tokens a weight has faded to 1/e.

    The spans go from 4 tokens, which a single head has, to 2 block_size, evenly in log. Both maps
    of a head have the same.
    """
    log_span = torch.linspace(math.log2(4), math.log2(2 * layer.config.block_size), layer.h)
    return torch.exp2(-log_span).repeat_interleave(layer.heads_per_value)[:, None, None]


def log_decay(rates, T, device):
    """log D, (H, T, T): minus rate times the distance i - j, and -inf for the future."""
    i = torch.arange(T, device=device)
    distance = i[:, None] - i
    return (-rates.to(device) * distance).masked_fill(distance < 0, -math.inf)


class SoftmaxDecay(Softmax):
    """A = softmax(Q K^T / sqrt(d) + log D)"""

    def forward(self, x, rope=None):  # without a state
        return Softmax.forward(self, x, rope)

    def attend(self, q, k, v, x, rope, state):
        return self.weights(q, k, rope).to(v.dtype) @ for_each_map(v, q)

    def weights(self, q, k, rope):
        scores = upcast(rotate(q, rope) @ rotate(k, rope).mT) / math.sqrt(self.d)
        return (scores + log_decay(decay_rates(self), q.shape[2], q.device)).softmax(-1)


class LinearDecay(Linear):
    """A_ij = (R_i phi(q_i)) . (R_j phi(k_j)) D_ij / z_i, where z_i is the sum without the R."""

    forward = SoftmaxDecay.forward
    attend = SoftmaxDecay.attend
    rates = decay_rates

    def weights(self, q, k, rope):
        q, k = self.phi(q), self.phi(k)
        D = log_decay(self.rates(), q.shape[2], q.device).exp()  # (H, T, T)
        z = (upcast(q @ k.mT) * D).sum(-1, keepdim=True) + 1e-12
        return upcast(rotate(q, rope) @ rotate(k, rope).mT) * D / z


class DiffLinearDecay(LinearDecay):
    """The difference of two such maps. They would fold. Here each is computed alone."""

    heads_per_value = 2
    usual_subln = 1.0
    make_parameters = Diff.make_parameters
    lam = Diff.lam
    subtract = Diff.subtract


class LinearOneShortHead(LinearDecay):
    """The first head has a span of 4 tokens, and the others never forget."""

    def rates(self):
        return torch.tensor([1 / 4] + [0] * (self.h - 1))[:, None, None]


class SoftmaxFactor(Softmax):
    """One map with diff's norm, and behind it diff's factor 1 - lambda_init of each layer."""

    usual_subln = 1.0

    def make_parameters(self, depth):
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)


class DiffConstant(Diff):
    """diff whose lambda_init is 0.8 in each layer, as in Table 6 of the paper."""

    def make_parameters(self, depth):
        super().make_parameters(depth)
        self.lambda_init = 0.8


class DiffLargeEmbedding(Diff):
    """diff in a model whose embedding starts four times as large. Beside it the norm is small."""


def draw_parameters(model, seed, draw=GPT.draw_parameters):
    draw(model, seed)
    if model.config.attn == "diff_large_embedding":
        model.wte.weight.data *= 4


class SoftmaxSum(Diff):
    """(A_1 + |lambda| A_2) / (1 + |lambda|): two maps and no minus. Its rows sum to 1."""

    def lam(self, x):
        return -Diff.lam(self, x).abs()

    def subtract(self, y, v, x, state):
        return super().subtract(y, v, x, state) / (1 - self.lam(x))


class DiffV2Minus(DiffV2):
    """(A_1 - lambda A_2) / (1 - lambda): as diff_v2, but its rows sum to 1."""

    def subtract(self, y, v, x, state):
        return super().subtract(y, v, x, state) / (1 - self.lam(x))


class DiffV2Plus(DiffV2Minus):
    """(A_1 + lambda A_2) / (1 + lambda)"""

    def lam(self, x):
        return -super().lam(x)


class SoftmaxOwn(SoftmaxAverage):
    """A - lambda I: in place of the average each token takes away its own value."""

    def subtract(self, y, v, x, state):
        return upcast(y) - self.lam(x) * v


class Gate(Softmax):
    """A_ij sigmoid(w . x_i): what diff_v2 is without its second map, whose rows sum to 1 - lambda.

    Each head and token has its own. The MLP is narrower, so that parameters equal softmax's.
    """

    @staticmethod
    def usual_mlp_width(C, H):  # for C H more parameters here. An MLP has 3 C a channel
        return max(8, Softmax.usual_mlp_width(C, H) - round(H / 3))

    def make_parameters(self, depth):
        self.gate_proj = nn.Linear(self.config.n_embd, self.h, bias=False)

    def subtract(self, y, v, x, state):
        return upcast(y) * upcast(self.gate_proj(x)).sigmoid().mT[..., None]  # (B, h, T, 1)


GPT.draw_parameters = draw_parameters  # no layer knows the embedding
ATTENTION |= {
    "softmax_decay": SoftmaxDecay,
    "linear_decay": LinearDecay,
    "diff_linear_decay": DiffLinearDecay,
    "linear_one_short_head": LinearOneShortHead,
    "softmax_factor": SoftmaxFactor,
    "diff_constant": DiffConstant,
    "diff_large_embedding": DiffLargeEmbedding,
    "softmax_sum": SoftmaxSum,
    "diff_v2_minus": DiffV2Minus,
    "diff_v2_plus": DiffV2Plus,
    "softmax_own": SoftmaxOwn,
    "gate": Gate,
}

if __name__ == "__main__":
    is_prompted = "--prompt" in str(sys.argv)
    sys.exit(sample.main() if is_prompted else math.inf in train.main())  # 1 if a run diverged
