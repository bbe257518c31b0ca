"""
Somebody's layer: its weights, how it is called, and what is seen of it from outside.

lab/port.py compares it with the paper's. This file knows nothing of what is right.
"""
import inspect
import itertools
import math
import re
from collections import defaultdict

import torch

from model import ATTENTION, GPTConfig

TOLERANCE = 1e-5  # of the largest output. float32 makes 2e-6
LAMBDAS = ["lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"]
# weights that hold several projections, and the orders in which their rows may be
FUSED = {"qkv": ["qkv", "qqkv", "qkqkvv", "qqkkv"], "qk": ["qk", "qkqk"], "kv": ["kv", "kkv"]}


def role_of(name, weight):
    """What a weight is: q, k, v, a fused one, o, lambda, lambda_q1, ..., norm, qk_norm or bias."""
    name = name.lower().replace("λ", "lam").replace("c_attn", "qkv").replace("in_proj", "qkv")
    words = [word.strip("w") for word in re.findall("[a-z]+", name)]
    pair = re.search("lam.*([qk])_?([12])", name)
    if pair:
        return f"lambda_{pair[1]}{pair[2]}"
    if "b" in words or "bias" in words:
        return "bias"
    if "lam" in name or weight.numel() == 1:
        return "lambda"
    if "norm" in words or weight.numel() == max(weight.shape):
        return "qk_norm" if re.search("[qk]_?(norm|ln|scale)|temp", name) else "norm"
    found = [re.fullmatch("([qkv]+)p?|que.*|keys?|val.*", word) for word in words]
    return "".join(match[1] or match[0][0] for match in found if match) or "o"


class Stranger:
    """A layer, what each of its weights is, and new weights for it, drawn."""

    def __init__(self, layer, n_head, depth, version, names):
        if not isinstance(layer, torch.nn.Module):  # a function of weights with Microsoft's names
            function = layer
            arm = "diff_v2" if version == 2 else "diff"
            layer = ATTENTION[arm](GPTConfig(attn=arm, n_head=n_head, n_embd=8 * n_head), depth)
            layer.forward = lambda x: function(x, self.drawn)
        self.layer = layer
        self.problem = None  # the first one, if it does not run
        every = dict(layer.named_parameters())
        self.weights = {n: w for n, w in every.items() if w.requires_grad} or every
        self.roles = {name: role_of(name, weight) for name, weight in self.weights.items()}
        self.roles |= {name: role for role, name in names.items()}
        if self.roles.keys() != self.weights.keys():
            raise ValueError(f"names: the weights of this layer are {', '.join(self.weights)}")
        self.heads = n_head * version // 2
        self.depth = depth
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.orders = [""]
        for role in self.roles.values():
            if re.fullmatch("[qkv]{2,}", role):  # one after the other, or head after head
                orders = FUSED.get(role, [role])
                self.orders = [order * n for n in (1, self.heads) for order in orders]

    def draw(self, order="", seed=1, flat=False):
        """Draws weights, and returns {role: [part, ...]} of them, in float64.

        order: of the rows of fused weights. flat: W_q = 0, so that all maps are flat. The values
        are loud, so that the eps of a norm does not show.
        """
        self.drawn = {}
        parts = defaultdict(list)
        loud = {"q": 0.0 if flat else 1.5, "v": 30.0, "bias": 0.0, "qk_norm": 0.0}
        for name, weight in self.weights.items():
            role = self.roles[name]
            shape = weight.shape
            if role in LAMBDAS:
                shape = shape[-1:]  # one lambda for all heads
            elif role == "lambda" and weight.ndim < 2:
                shape = ()
            number = seed + sum(map(ord, role if "lambda" in role else name))
            new = torch.randn(shape, generator=torch.Generator().manual_seed(number))
            new = new / math.sqrt(max(shape, default=1))
            if "lambda" in role and len(shape) < 2:  # so that 0 < lambda < 1
                new = (new.abs() / 2).clamp(max=0.9).expand(weight.shape).clone()
            letters = order if re.fullmatch("[qkv]{2,}", role) else [role]
            for letter, part in zip(letters, torch.atleast_1d(new).chunk(len(letters) or 1)):
                part *= loud.get(letter, 1.0)
                part += letter in ("norm", "qk_norm")
                if part.ndim == 3:  # a matrix for each head, (h, C, d) or (h, d, C)
                    part = part.flatten(0, 1).T if letter == "o" else part.mT.flatten(0, 1)
                parts[letter].append(part.double())
            self.drawn[name] = new.requires_grad_()
        return parts

    def run(self, given, x):
        """The output, of several the first, or None where such a call fails."""
        given = {name: x if value is Stranger else value for name, value in given.items()}
        try:
            y = torch.func.functional_call(self.layer, self.drawn, (x,), given)
            y = y[0] if isinstance(y, (tuple, list)) else y
            assert y.shape == x.shape, f"it gives {tuple(y.shape)} for {tuple(x.shape)}"
            return y
        except Exception as problem:  # it wants something else
            self.problem = self.problem or problem

    def ways(self):
        """A text x (2, T, C), and what is given besides in those calls that run on it."""
        arguments = list(inspect.signature(self.layer.forward).parameters.values())[1:]
        wanted = [a.name for a in arguments if re.search("mask|causal", a.name)
                  or a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD]
        lengths = [n for m in self.layer.modules() for n in vars(m).values() if type(n) is int]
        widths = [n for weight in self.weights.values() for n in weight.shape[-2:]]
        for T, C in itertools.product([12] + lengths, sorted(set(widths), key=widths.count)[::-1]):
            x = torch.randn(2, T, C, generator=torch.Generator().manual_seed(0))
            ways = {}  # {output: what is given for it, at last: a layer may keep an old mask}
            for offers in self.offers(T, C) if wanted else [{}]:
                given = {name: next(offers[words] for words in offers
                                    if re.search(words, name.lower())) for name in wanted}
                ways[str(self.run(given, x))] = given
            ways.pop("None", None)  # what does not run
            if ways:
                return x, list(ways.values())
        raise ValueError(f"the layer does not run: {self.problem!r}")

    def offers(self, T, C):
        """What forward may want, by the words in an argument's name."""
        later = torch.ones(T, T, dtype=torch.bool).triu(1)
        tables = [(None, None, None), (None, None, Stranger)]  # cos, sin, both in another form
        for d in (C // self.heads, C // self.heads // 2):
            angle = torch.arange(T)[:, None] * 1e4 ** (-torch.arange(0, d, 2) / d)
            cos, sin = angle.cos(), angle.sin()
            matrices = torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))
            tables += [(cos, sin, form) for form in (torch.complex(cos, sin), matrices)]
            twice = torch.cat((angle, angle), -1)
            tables += [(a.cos(), a.sin(), (a.cos(), a.sin())) for a in (angle, twice, twice[None])]
        masks = [None, True, torch.zeros(T, T).masked_fill(later, -math.inf), ~later, later]
        masks += [mask.expand(2, self.heads, T, T) for mask in masks[2:]] + [torch.ones(2, T)]
        for mask, (cos, sin, table) in itertools.product(masks, tables):
            yield {"mask": mask, "causal": True, "^x?(k|v|kv|keys?|values?|context)$": Stranger,
                   "layer|depth|idx": self.depth, "lam|λ": self.lambda_init, "cache|past": None,
                   "cos": cos, "sin": sin, "start|infer": 0, "pos.*ids": torch.arange(T)[None],
                   "": table}

    def look(self, given, x):
        """{mistake: detail}, what is seen from outside."""
        y = self.run(given, x)
        T = x.shape[1]
        if not y.isfinite().all():
            return {"NaN": ""}
        if apart(self.run(given, x), y).max() > TOLERANCE:
            return {"random": ""}
        moved = torch.zeros(T, 2, T)  # token j of sample b, by a change of token i in sample 0
        for i in range(T):
            other = x.clone()
            other[0, i] = x[1, i]
            moved[i] = apart(self.run(given, other), y)
        own, others = moved.unbind(1)
        i, j = divmod(own.tril(-1).argmax().item(), T)
        short = self.run(given, x[:, :T // 2])
        seen = {}
        if own[i, j] > TOLERANCE and i > j:
            seen["sees the future"] = f"Token {i} moves token {j} by {own[i, j]:.1%}."
        elif short is not None and apart(short, y[:, :T // 2]).max() > TOLERANCE:
            seen["length"] = ""
        if own.triu(1).max() < TOLERANCE:
            seen["no past"] = ""
        if others.max() > TOLERANCE:
            seen["mixes samples"] = f"By {others.max():.1%}."
        return seen | self.switch(given, x, y)

    def switch(self, given, x, y):
        """{"switch": its name}, if one of the layer's switches changes the output y."""
        found = {}
        for module, name in [(m, name) for m in self.layer.modules() for name in vars(m)]:
            value = getattr(module, name)
            if type(value) is bool and re.search("flash|fused|sdpa|train", name):
                setattr(module, name, not value)
                other = self.run(given, x)
                if other is not None and torch.equal(other, self.run(given, x)):  # no dropout
                    found |= {"switch": name} if apart(other, y).max() > TOLERANCE else {}
                setattr(module, name, value)
        return found

    def dead(self, given, x):
        """The names of the lambdas, and of matrices of which some rows, that have no gradient."""
        y = self.run(given, x)
        names = [n for n, w in self.drawn.items() if w.ndim > 1 or "lambda" in self.roles[n]]
        if not y.requires_grad:
            return []
        weights = [self.drawn[name] for name in names]
        grads = torch.autograd.grad((y * x).sum(), weights, allow_unused=True)
        return [n for n, grad in zip(names, grads) if grad is None or not grad.any(-1).all()]


def apart(a, b):
    """How far the tokens of a and b are apart, (B, T), in parts of the largest number."""
    return ((a - b).abs().amax(-1) / b.abs().max()).detach()
