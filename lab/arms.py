"""
More arms: the controls of the lab.

    python -m lab.arms --attn=linear_decay    # trains one
    python -m lab.arms --ckpt=out/toy/linear_decay --prompt="Once upon a time"
    python -m lab.arms --help                 # lists them

Each is a class on the contract of model.Attention. The arms with decay have a make_map alone. So
they are slow, and read the whole text anew for each token of a sample. Decay is ALiBi for softmax
(arXiv 2108.12409) and RetNet's retention for linear maps (2307.08621).

The other flags are those of train.py, or of sample.py if there is a --ckpt: see their --help.
"""
import math
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

import sample
import train
from model import ATTENTION, Attention, Diff, DiffV2, Softmax, SoftmaxAverage, phi, rotate
from model import softmax_attention, softmax_map, upcast

# ---- decay

def decay_rates(layer):
    """1 / span of each map, (H, 1, 1). After `span` tokens a weight has faded to 1/e.

    The spans go from 4 tokens (a single head has 4) to 2 block_size, evenly in log. Both maps
    of a head have the same.
    """
    log_span = torch.linspace(math.log2(4), math.log2(2 * layer.config.block_size), layer.h)
    return torch.exp2(-log_span).repeat_interleave(layer.value_width)[:, None, None]


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


class DiffLinearDecay(Diff):
    """The difference of two linear maps with decay.

    They would fold, as in diff_linear. Here each is computed alone.
    """

    def make_map(self, q, k, x, rope):
        A = decaying_linear_map(q, k, rope, decay_rates(self))  # (B, H, T, T)
        return A[:, 0::2] - self.lam(x) * A[:, 1::2]


class LinearOneShortHead(Attention):
    """linear: its first head has a span of 4 tokens, the others never forget."""

    def make_map(self, q, k, x, rope):
        rates = torch.tensor([1 / 4] + [0] * (self.h - 1))[:, None, None]
        return decaying_linear_map(q, k, rope, rates)


# ---- parts of diff

class RowsSumToOne:
    """Divides a difference by 1 - lambda, which its rows sum to. It is the first of two parents."""

    def make_map(self, q, k, x, rope):
        return super().make_map(q, k, x, rope) / (1 - self.lam(x))

    def attend(self, q, k, v, x, rope, state):
        return super().attend(q, k, v, x, rope, state) / (1 - self.lam(x))


class SoftmaxFactor(Softmax):
    """One map with diff's norm and, behind it, diff's factor 1 - lambda_init."""

    usual_subln = 1.0

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)  # as in Diff


class SoftmaxFactorSmall(SoftmaxFactor):
    """softmax_factor with a lambda_init of 0.8: its factor is 0.2 in each layer."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.lambda_init = 0.8


class DiffConstant(Diff):
    """diff with a lambda_init of 0.8 in each layer, as in the paper's Table 6."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.lambda_init = 0.8


class SoftmaxSum(RowsSumToOne, Diff):
    """(A_1 + |lambda| A_2) / (1 + |lambda|): two maps and no minus."""

    def lam(self, x):
        return -super().lam(x).abs()


class SoftmaxOwn(SoftmaxAverage):
    """A - lambda I: each token takes away its own value, not the average."""

    def make_map(self, q, k, x, rope):
        A = softmax_map(q, k, rope)
        return A - self.lam(x) * torch.eye(A.shape[-1], device=A.device)

    def attend(self, q, k, v, x, rope, state):
        return softmax_attention(q, k, v, rope, state, self.config.kernel) - self.lam(x) * v


# ---- parts of diff_v2

class DiffV2Minus(RowsSumToOne, DiffV2):
    """(A_1 - lambda A_2) / (1 - lambda): as diff_v2, but its rows sum to 1."""


class DiffV2FreePlus(DiffV2):
    """A_1 + lambda A_2: diff_v2 with the other sign. Its rows sum to 1 + lambda."""

    def lam(self, x):
        return -super().lam(x)


class DiffV2Plus(RowsSumToOne, DiffV2FreePlus):
    """(A_1 + lambda A_2) / (1 + lambda): the sum, with rows that sum to 1."""


class DiffV2SmallerPlus(DiffV2Plus):
    """(A_1 + lambda A_2) (1 - lambda) / (1 + lambda): diff_v2's row sums."""

    def make_map(self, q, k, x, rope):
        return super().make_map(q, k, x, rope) * (1 + self.lam(x))  # lam is minus lambda here

    def attend(self, q, k, v, x, rope, state):
        return super().attend(q, k, v, x, rope, state) * (1 + self.lam(x))


class DiffV2FreeSign(DiffV2):
    """A_1 - lambda A_2, where lambda = tanh(w . x) starts at 0 and may be a plus."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        del self.lambda_proj  # a GPT would draw it
        self.lambda_w = nn.Parameter(torch.zeros(self.h, config.n_embd))

    def lam(self, x):
        return upcast(F.linear(x, self.lambda_w)).tanh().mT[..., None]  # (B, h, T, 1)


class GatedAverage(SoftmaxAverage):
    """A - sigmoid(w . x) U: diff_v2 with the average in place of its second map.

    Its rows have the sums of diff_v2's, and A the same share of them.
    """

    def __init__(self, config, depth):
        super().__init__(config, depth)
        del self.lambda_average
        self.lambda_proj = nn.Linear(config.n_embd, self.h, bias=False)

    lam = DiffV2.lam


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

    def attend(self, q, k, v, x, rope, state):
        return softmax_attention(q, k, v, rope, state, self.config.kernel) * self.gate(x)


class TwoGates(Gate):
    """sigmoid(a . x) A_1 + sigmoid(b . x) A_2, with diff_v2's two queries."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.q_proj = nn.Linear(config.n_embd, 2 * config.n_embd, bias=False)
        self.gate_proj = nn.Linear(config.n_embd, 2 * self.h, bias=False)  # for each map and token

    def make_map(self, q, k, x, rope):
        A = super().make_map(q, k, x, rope)  # (B, 2h, T, T)
        return A[:, 0::2] + A[:, 1::2]

    def attend(self, q, k, v, x, rope, state):
        y = super().attend(q, k, v, x, rope, state)  # (B, 2h, T, d_v)
        return y[:, 0::2] + y[:, 1::2]


ARMS = {
    "softmax_decay": SoftmaxDecay,
    "linear_decay": LinearDecay,
    "diff_linear_decay": DiffLinearDecay,
    "linear_one_short_head": LinearOneShortHead,
    "softmax_factor": SoftmaxFactor,
    "softmax_factor_small": SoftmaxFactorSmall,
    "diff_constant": DiffConstant,
    "softmax_sum": SoftmaxSum,
    "softmax_own": SoftmaxOwn,
    "diff_v2_minus": DiffV2Minus,
    "diff_v2_free_plus": DiffV2FreePlus,
    "diff_v2_plus": DiffV2Plus,
    "diff_v2_smaller_plus": DiffV2SmallerPlus,
    "diff_v2_free_sign": DiffV2FreeSign,
    "gated_average": GatedAverage,
    "gate": Gate,
    "two_gates": TwoGates,
}


def register():
    """Makes model.py know these arms. Each program that builds or loads models by name calls it."""
    ATTENTION.update(ARMS)


def print_help():
    print(__doc__)
    for name, arm in ARMS.items():
        first_line = arm.__doc__.splitlines()[0]
        print(f"  {name:23}{first_line}")


def main(argv=None):
    """Trains arms, or prints a sample of one if there is a --ckpt. Returns the exit code."""
    register()
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print_help()
        return 0
    if any(arg == "--ckpt" or arg.startswith("--ckpt=") for arg in argv):
        sample.main(argv)
        return 0
    losses = train.main(argv)
    return 1 if math.inf in losses else 0  # 1 if a run diverged


if __name__ == "__main__":
    sys.exit(main())
