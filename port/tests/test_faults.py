"""Layers with which an attack found a checker wrong, each with others of its kind."""
import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from port import diagnose, paper
from port.roles import NoVerdict, role_of
from port.tests.right_layers import INIT, VECTORS, Right, rotate_neighbours, tables

torch.set_num_threads(1)


def later(T, start=1):
    return torch.ones(T, T, dtype=torch.bool).triu(start)


class Dropouts(Right):
    """Right. It has a dropout by function, and one in place."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.1, inplace=True)

    def forward(self, x):
        return F.dropout(super().forward(self.dropout(x)), 0.1, self.training)


class FlashAsItTrains(Right):
    """The path that it trains with has a dropout."""
    options = dict(is_causal=True)

    def one_map(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, **self.options)

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        q, k, v = self.split(x)
        q, k = self.turn(q), self.turn(k)
        first, second = [self.one_map(q[:, n::2], k[:, n::2], v) for n in (0, 1)]
        return self.finish(first - self.lam() * second)


class NotCausalAsItTrains(FlashAsItTrains):
    options = {}


class OtherScaleAsItTrains(FlashAsItTrains):
    options = dict(is_causal=True, scale=1.0)


class DropoutByPosition(FlashAsItTrains):
    def one_map(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, None, 0.1, True)


class LeaksBesideNoise(Right):
    """As it trains. The noise is no dropout."""

    def forward(self, x):
        y = super().forward(x)
        return y + x.flip(1) + torch.rand_like(y) if self.training else y


class DropsByHand(Right):
    """Right. But a dropout by hand can't be told from something else."""

    def merge(self, y):
        y = super().merge(y)
        return y * (torch.rand_like(y) > 0.1) / 0.9 if self.training else y


class DropPath(Right):
    """Right. A whole text is dropped now and then, so two runs may be equal."""

    def merge(self, y):
        y = super().merge(y)
        return y * y.new_empty(len(y), 1, 1).bernoulli_(0.9) / 0.9 if self.training else y


class FailsAsItTrains(Right):
    def merge(self, y):
        assert not self.training
        return super().merge(y)


class OtherLongTextsAsItTrains(Right):
    def mask(self, scores):
        masked = super().mask(scores)
        return scores if self.training and scores.shape[-1] > 32 else masked


class FlashWithDropoutAlways(FlashAsItTrains):
    def forward(self, x):
        self.training = True
        return super().forward(x)


class Window(Right):
    """Of 64 tokens, in a context of 128, which no attribute names."""

    def mask(self, scores):
        T = scores.shape[-1]
        assert T <= 128
        return super().mask(scores).masked_fill(~later(T, start=-63), -math.inf)


class MaskOf40(Right):
    def __init__(self):
        super().__init__()
        mask = torch.zeros(64, 64, dtype=torch.bool)
        mask[:40, :40] = later(40)
        self.register_buffer("table", mask)

    def mask(self, scores):
        T = scores.shape[-1]
        return scores.masked_fill(self.table[:T, :T], -math.inf)


class BeyondItsBlock(Right):
    """It forgets its mask behind the 500 tokens that it names."""
    block_size = 500

    def __init__(self):
        super().__init__()
        self.block = self.block_size

    def mask(self, scores):
        return scores if scores.shape[-1] > 500 else super().mask(scores)


class OddLengthsLeak(Right):
    def mask(self, scores):
        return scores if scores.shape[-1] % 2 else super().mask(scores)


class FullPiecesLeak(Right):
    """As where a faster kernel takes texts that are a multiple of its piece."""

    def mask(self, scores):
        return scores if scores.shape[-1] % 64 == 0 else super().mask(scores)


class TwoTokensLeak(Right):
    def mask(self, scores):
        return scores if scores.shape[-1] == 2 else super().mask(scores)


class LastPieceLeaks(Right):
    def mask(self, scores):
        T = scores.shape[-1]
        mask = later(T)
        if T > 16:
            mask[T // 16 * 16 :] = False
        return scores.masked_fill(mask, -math.inf)


class OneTokenIsZero(Right):
    def forward(self, x):
        return super().forward(x) * (x.shape[1] > 1)


class OneSampleLeaks(Right):
    def mask(self, scores):
        return scores if len(scores) == 1 else super().mask(scores)


class Named(nn.Module):
    """Right. A weight for each map, with names that one may choose."""

    def __init__(self, **others):
        super().__init__()
        self.name = dict(q1="q1", q2="q2", k1="k1", k2="k2", v="v", o="o", vectors=VECTORS) | others
        for key in ("q1", "q2", "k1", "k2", "v", "o"):
            self.add_module(self.name[key], nn.Linear(64, 64 if key in "vo" else 32, bias=False))
        for name in self.name["vectors"]:
            self.register_parameter(name, nn.Parameter(torch.randn(8) / 10))
        self.norm = nn.RMSNorm(16, eps=1e-5)

    def forward(self, x):
        def apply(key, width):
            y = self.get_submodule(self.name[key])(x)
            return y.unflatten(-1, (4, width)).transpose(1, 2)

        q1, q2, k1, k2 = [rotate_neighbours(apply(key, 8), *tables(x.shape[1], 8))
                          for key in ("q1", "q2", "k1", "k2")]
        A = [(q @ k.mT / 8**0.5).masked_fill(later(x.shape[1]), -math.inf).softmax(-1)
             for q, k in ((q1, k1), (q2, k2))]
        a, b, c, d = [getattr(self, name) for name in self.name["vectors"]]
        y = (A[0] - ((a @ b).exp() - (c @ d).exp() + INIT) * A[1]) @ apply("v", 16)
        y = (self.norm(y) * (1 - INIT)).transpose(1, 2).flatten(2)
        return self.get_submodule(self.name["o"])(y)


class Settings(Right):
    """Right. These change what it computes, and are no second way to compute it."""

    def __init__(self):
        super().__init__()
        self.train_lambda = self.pretrained = self.use_kernel_norm = True

    def lam(self):
        return super().lam() if self.train_lambda and self.pretrained else self.lambda_init

    def norm(self, y):
        return self.subln(y) if self.use_kernel_norm else y


def with_lambda_init(number):
    layer = Right()
    layer.lambda_init = number
    return layer


class ResidualInPlace(Right):
    def forward(self, x):
        y = super().forward(x)
        x += y
        return y


class ShiftedInPlace(Right):
    def forward(self, x):
        x -= x.mean(-1, keepdim=True)
        return super().forward(x)


class SoftmaxWithoutMaximum(Right):
    def attention(self, scores):
        A = self.mask(scores).exp()
        return A / A.sum(-1, keepdim=True)


class MapsSwapped(Right):
    """Right: the second map less lambda times the first."""

    def subtract(self, A, v):
        return (A[:, 1::2] - self.lam() * A[:, 0::2]) @ v


class NoInitInLambda(Right):
    def lam(self):
        return super().lam() - self.lambda_init


class Zero(Right):
    def forward(self, x):
        return super().forward(x) * 0


@pytest.mark.parametrize("layer, kind, names", [
    (Dropouts(), "SAME", ""),
    (FlashAsItTrains(), "SAME", ""),
    (DropoutByPosition(), "SAME", ""),
    (NotCausalAsItTrains(), "BROKEN", "sees the future"),
    (OtherScaleAsItTrains(), "BROKEN", "switch"),
    (OtherLongTextsAsItTrains(), "BROKEN", "sees the future"),
    (LeaksBesideNoise(), "BROKEN", "sees the future"),
    (FlashWithDropoutAlways(), "BROKEN", "dropout"),
    (Window(), "DIFFERS", "length"),
    (MaskOf40(), "BROKEN", "sees the future"),
    (BeyondItsBlock(), "BROKEN", "sees the future"),
    (OddLengthsLeak(), "BROKEN", "sees the future"),
    (FullPiecesLeak(), "BROKEN", "sees the future"),
    (TwoTokensLeak(), "BROKEN", "sees the future"),
    (LastPieceLeaks(), "BROKEN", "sees the future"),
    (OneTokenIsZero(), "DIFFERS", "length"),
    (OneSampleLeaks(), "BROKEN", "mixes samples"),
    (Named(q1="q_a", q2="q_b", k1="k_a", k2="k_b"), "SAME", ""),
    (Named(v="value_b", o="wo_b"), "SAME", ""),
    (Named(vectors=["lambda_a", "lambda_b", "lambda_c", "lambda_d"]), "SAME", ""),
    (Named(vectors=["l_q1", "l_k1", "l_q2", "l_k2"]), "SAME", ""),
    (Named(vectors=["a1", "b1", "a2", "b2"]), "SAME", ""),
    (Settings(), "SAME", ""),
    (with_lambda_init(0.0), "DIFFERS", "lambda_init"),
    (with_lambda_init(paper.lambda_init_of(15)), "DIFFERS", "lambda_init"),
    (with_lambda_init(0.8), "CHOICE", "constant lambda_init"),
    (ShiftedInPlace(), "DIFFERS", "writes into x"),
    (SoftmaxWithoutMaximum(), "SAME", "large scores"),
    (MapsSwapped(), "SAME", "maps swapped"),
    (Zero(), "BROKEN", "no past, dead weights"),
], ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value))
def test_the_verdict_is_right(layer, kind, names):
    verdict = diagnose(layer, depth=3)
    assert verdict.kind == kind
    found = {of_kind: verdict.names[of_kind] for of_kind in ("BROKEN", "DIFFERS", "CHOICE")}
    beside = set(verdict.names["SAME"] + verdict.names["NOTE"])  # what is said of a right layer
    assert set(sum(found.values(), [])) == {*names.split(", ")} - beside - {""}


@pytest.mark.parametrize("layer", [DropsByHand(), DropPath(), FailsAsItTrains()])
def test_a_doubt_is_no_verdict(layer):
    with pytest.raises(NoVerdict, match="it would be SAME, but"):
        diagnose(layer, depth=3)


def test_an_encoder_whose_causal_mask_is_an_argument():
    class Either(Right):
        def forward(self, x, is_causal=False):
            self.is_causal = is_causal
            return super().forward(x)

        def mask(self, scores):
            return super().mask(scores) if self.is_causal else scores

    assert diagnose(Either(), depth=3).kind == "SAME"
    assert diagnose(Either(), depth=3, causal=False).kind == "SAME"


def test_a_layer_that_does_not_run_says_where():
    class Fails(Right):
        def finish(self, y):
            raise KeyError("this one")

    with pytest.raises(NoVerdict, match="KeyError: 'this one' .line"):
        diagnose(Fails())


def test_a_factor_that_is_right_is_not_named_for_a_lambda_init_that_is_wrong():
    assert diagnose(NoInitInLambda(), depth=3).names["DIFFERS"] == ["lambda_init"]


def test_a_layer_without_gradients():
    with pytest.raises(NoVerdict, match="it can't be trained"):
        diagnose(ResidualInPlace())


def test_a_vector_of_one_channel_does_not_show_n_head():
    class Short(Right):
        def __init__(self):
            super().__init__()
            for name in VECTORS:
                setattr(self, name, nn.Parameter(torch.randn(4, 1, 1) / 10))

        def lam(self):
            first, second = [getattr(self, f"lambda_q{n}") * getattr(self, f"lambda_k{n}")
                             for n in (1, 2)]
            return first.exp() - second.exp() + INIT

    assert diagnose(Short(), n_head=8, depth=3).kind == "SAME"


@pytest.mark.parametrize("name, shape, role", [
    ("beta", (16,), "bias"), ("proj_b", (16,), "bias"), ("b1", (8,), "unknown"),
    ("c_attn.bias", (192,), "bias"), ("b_Q", (4, 16), "bias"), ("norm.offset", (16,), "bias"),
    ("q_b.weight", (64, 64), "q"), ("lambda_b", (8,), "lambda"), ("lambda_proj.bias", (4,), "bias"),
])
def test_a_matrix_is_no_bias(name, shape, role):
    assert role_of(name, torch.zeros(shape)) == role
