"""
The paper's layer in plain steps: Eq. 1 to 3 of arXiv 2410.05258, grouped keys, and version 2.

`python -m port` runs this code in float64 beside somebody's layer, a port. A mistake is another
function in place of one of the steps below (port/wrong.py), or another number in w.

    B   batch                       h     heads, each with two maps
    T   tokens                      kv    heads that have keys and values of their own
    C   channels of a token         d     channels of the query of one map
                                    d_v   channels of a value: 2d in the paper

w holds the weights, the sizes and the numbers of a layer: see Weights.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from model import NORM_EPS, rotate


@dataclass
class Weights:
    """w. The rows of a matrix are outputs, as in torch. o and norm are set when d_v is known."""

    version: int  # 1, 2, or 0 for plain softmax
    h: int
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor = None
    norm: Tensor = None  # (h, 1, d_v)
    output_norm: Tensor = None  # of a norm behind o, which the paper has not
    gate: Tensor = None  # of version 2
    lambda_q1: Tensor = torch.zeros(1)
    lambda_k1: Tensor = torch.zeros(1)
    lambda_q2: Tensor = torch.zeros(1)
    lambda_k2: Tensor = torch.zeros(1)
    lambda_init: float = 0.0
    factor: float = 1.0  # 1 - lambda_init in the paper
    theta: float = 10000.0

    # what follows from these
    maps: int = field(init=False)  # of a head
    key_maps: int = field(init=False)  # of a head's keys
    d: int = field(init=False)
    kv: int = field(init=False)
    d_v: int = field(init=False)
    paper_d_v: int = field(init=False)
    scale: float = field(init=False)
    turned: int = field(init=False)  # channels that the rotary embedding turns

    def __post_init__(self):
        self.maps = 1 if self.version == 0 else 2
        self.key_maps = 2 if self.version == 1 else 1  # version 2 has one key for both maps
        self.d = len(self.q) // self.h // self.maps
        self.kv = max(1, len(self.k) // self.d // self.key_maps)
        self.d_v = len(self.v) // self.kv
        self.paper_d_v = 2 * self.d if self.version == 1 else self.d
        self.scale = math.sqrt(self.d)
        self.turned = self.d

    @property
    def exp_part(self):
        """lambda without lambda_init: one for all heads, or one for each. (1 or h, 1, 1)"""
        return exp_dot(self.lambda_q1, self.lambda_k1) - exp_dot(self.lambda_q2, self.lambda_k2)


def layer(x, w, step):
    """The whole layer, (B, T, C) to (B, T, C). step: the Steps below, or others in their place."""
    q, k, v = project(x, w, step)
    y = attend(q, k, v, step.lam(x, w), w, step)
    return step.output(y, w, step) * w.factor  # Eq. 3: the factor is 1 - lambda_init


def project(x, w, step):
    """Queries and keys, rotated, and values, for each head."""
    q = step.split(x @ w.q.T, w.h, w.maps)  # (B, h, 2, T, d)
    k = step.split(x @ w.k.T, w.kv, w.key_maps)  # (B, kv, 2, T, d). In version 2 there is one
    v = step.values(x @ w.v.T, w, step)  # (B, kv, 1, T, d_v)
    k = step.group_keys(k, w.h // w.kv)  # (B, h, 2, T, d)
    v = step.group_values(v, w.h // w.kv)  # (B, h, 1, T, d_v)
    return step.queries(q, w, step), rotary(k, w, step), v


def attend(q, k, v, lam, w, step):
    """Eq. 1: what each head gives before its norm, (B, h, T, d_v)."""
    scores = step.scores(q, k, w)  # (B, h, 2, T, T)
    A = step.maps(scores)
    return step.subtract(A, scores, v, lam)


# ---- the steps, as the paper has them

def split(y, n, maps):
    """(B, T, n * maps * c) to (B, n, maps, T, c): the maps of one head are neighbours."""
    return y.unflatten(-1, (n, maps, -1)).permute(0, 2, 3, 1, 4)


def values(y, w, step):
    return step.split(y, w.kv, 1)


def repeat(m, times):
    """Keys or values (B, kv, maps, T, c), for each of the heads that share them."""
    return m.repeat_interleave(times, dim=1)


def turn(m, theta):
    """Neighbouring channels turn by position * theta^(-2i/d) (RoFormer, Eq. 34)."""
    return rotate(m, angles(m, theta))


def rotary(m, w, step):
    """Turn the first w.turned channels of each map. In the paper these are all."""
    return torch.cat((step.turn(m[..., : w.turned], w.theta), m[..., w.turned :]), dim=-1)


def scores(q, k, w):
    """The scale is sqrt(d)."""
    return q @ k.mT / w.scale


def maps(scores):
    """(B, h, 2, T, T). The scores of later tokens are -inf before the softmax."""
    return scores.masked_fill(is_later(scores), -math.inf).softmax(-1)


def lam(x, w):
    """Eq. 2: exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init"""
    return w.exp_part + w.lambda_init


def subtract(A, scores, v, lam):
    """A_1 V - lambda A_2 V"""
    y = A @ v
    return y[:, :, 0] - lam * y[:, :, 1]


def rms(y, dims):
    """An RMSNorm without its weight."""
    return y * torch.rsqrt(y.square().mean(dims, keepdim=True) + NORM_EPS)


def gain(weight):
    """The weight of the norm, (h, 1, d_v)."""
    return weight


def norm(y, w, step):
    """Over the channels of one token and one head, and over nothing else."""
    return step.rms(y, -1) * step.gain(w.norm)


def merge(y):
    """The heads side by side: (B, h, T, d_v) to (B, T, h * d_v)."""
    return y.transpose(1, 2).flatten(2)


def output(y, w, step):
    return step.merge(step.norm(y, w, step)) @ w.o.T


@dataclass(frozen=True)
class Steps:
    """A layer. replace(PAPER, maps=wrong.no_mask) is one with a mistake."""

    split: Callable = split
    values: Callable = values
    group_keys: Callable = repeat
    group_values: Callable = repeat
    turn: Callable = turn
    queries: Callable = rotary
    scores: Callable = scores
    maps: Callable = maps
    lam: Callable = lam
    subtract: Callable = subtract
    rms: Callable = rms
    gain: Callable = gain
    norm: Callable = norm
    merge: Callable = merge
    output: Callable = output


# ---- version 2, an encoder, and plain softmax: where they are not the first version

def all_maps(scores):
    """An encoder has no mask."""
    return scores.softmax(-1)


def lam_of_version_2(x, w):
    """sigmoid(x W), one number for each token and head, (B, h, T, 1)."""
    return torch.sigmoid(x @ w.gate.T).mT[..., None]


def no_norm(y, w, step):
    return y


def one_map(A, scores, v, lam):
    return (A @ v)[:, :, 0]


PAPER = Steps()
VERSION_2 = replace(PAPER, lam=lam_of_version_2, norm=no_norm)
SOFTMAX = replace(PAPER, subtract=one_map, norm=no_norm)


def steps_of(version, causal):
    """version 1, 2, or 0 for plain softmax."""
    steps = {0: SOFTMAX, 1: PAPER, 2: VERSION_2}[version]
    return steps if causal else replace(steps, maps=all_maps)


def lambda_init_of(depth):
    return 0.8 - 0.6 * math.exp(-0.3 * depth)  # the first layer is depth 0


# ---- what the steps are made of

def exp_dot(a, b):
    """exp(a . b): one for all heads, or one for each. (1 or h, 1, 1)"""
    return (a * b).sum(-1).exp().reshape(-1, 1, 1)


def is_later(scores):
    return torch.ones_like(scores[0, 0, 0], dtype=torch.bool).triu(1)


def angles(m, theta):
    """Cosines and sines for each position and each pair of channels, (T, d/2)."""
    T, d = m.shape[-2:]
    frequency = theta ** (-torch.arange(0, d, 2).double() / d)
    angle = torch.arange(T)[:, None] * frequency
    return angle.cos(), angle.sin()
