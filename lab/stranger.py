"""
Somebody's layer: its file, its weights, how it is called, and what is seen of it from outside.

lab/port.py compares it with the paper's. This file knows nothing of what is right.
"""
import inspect
import itertools
import math
import re
import sys
from collections import defaultdict
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from torch import nn

TOLERANCE = 1e-5  # of the largest output. float32 makes 2e-6
LAMBDAS = ["lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"]
# words in the names of weights that say nothing of what they are
NOISE = (r"weights?|projections?|proj|linear|layer|matrix|attention|attn|fc|lin|to_|net|w|_"
         r"|\.\d+(?=\.|$)")
# weights that hold several projections, and the orders in which their rows may be
FUSED = {"qkv": ["qkv", "qqkv", "qkqkvv", "qqkkv"], "qk": ["qk", "qkqk"], "kv": ["kv", "kkv"]}


class PortError(ValueError):
    """The port could not be looked at. The message says what to do."""


def role_of(name, weight):
    """What a weight is, by its name: q, k, v, o, a fused one, lambda..., norm, qk_norm or bias."""
    name = name.lower().replace("λ", "lam").replace("c_attn", "qkv").replace("in_proj", "qkv")
    pair = re.search("lam.*([qk])_?([12])", name)
    if pair:
        return f"lambda_{pair[1]}{pair[2]}"
    if "lam" in name or weight.numel() == 1:
        return "lambda"
    if re.search(r"bias|(^|\.)b_?[qkvo]?$", name):
        return "bias"
    if weight.numel() == max(weight.shape):
        return "qk_norm" if re.search("[qk]_?(norm|ln)", name) else "norm"
    last = re.sub(NOISE, "", name).strip(".").split(".")[-1]
    last = re.sub("quer(y|ies)", "q", re.sub("keys?", "k", re.sub("val(ue)?s?", "v", last)))
    return last.rstrip("0123456789") if re.fullmatch(r"(qkv|qk|kv|q|k|v)\d*", last) else "o"


class Stranger:
    """A layer with its weights by name, and what each of them is, its role."""

    def __init__(self, layer, n_head, version, names):
        self.n_head = n_head
        self.heads = n_head if version == 2 else n_head // 2
        if isinstance(layer, nn.Module):
            self.layer = layer.float().eval()
            self.weights = dict(layer.named_parameters())
        else:  # a function of weights with Microsoft's names
            C = 8 * n_head
            sizes = dict.fromkeys(("k_proj.weight", "v_proj.weight", "out_proj.weight"), (C, C))
            sizes |= {"q_proj.weight": (version * C, C), "lambda_proj.weight": (n_head, C)}
            sizes |= dict.fromkeys(LAMBDAS, (8,)) | {"subln.weight": (16,)}
            self.weights = {name: torch.zeros(size) for name, size in sizes.items()}
            self.layer = nn.Module()
            self.layer.forward = lambda x: layer(x, self.weights)
        self.roles = {name: role_of(name, weight) for name, weight in self.weights.items()}
        for role, name in (names or {}).items():
            if name not in self.weights:
                raise PortError(f"names: there is no {name} among {', '.join(self.weights)}")
            self.roles[name] = role
        self.before = {name: weight.detach().clone() for name, weight in self.weights.items()}
        fused = [role for role in FUSED if role in self.roles.values()]
        self.problem = ""
        self.orders = FUSED[fused[0]] + [fused[0] * self.heads] if fused else [""]

    def draw(self, order, seed, flat=False):
        """Draws new weights, and returns {role: [part, ...]} of them, in float64.

        order: of the rows of fused weights. flat: W_q = 0, so that all maps are flat. The values
        are loud, so that the eps of a norm does not show.
        """
        parts = defaultdict(list)
        by_number = sorted(self.weights, key=lambda n: re.sub(r"\d+", lambda i: i[0].zfill(4), n))
        for name in by_number:  # head 2 comes before head 10
            weight = self.weights[name].data
            role = self.roles[name]
            word = role if role.startswith("lambda") else name  # one lambda for all heads
            random = torch.Generator().manual_seed(seed + sum(map(ord, word)))
            if role in ("bias", "qk_norm"):
                weight.fill_(role == "qk_norm")
            elif role in LAMBDAS:  # in seed 1 q1 . k1 < 0 < q2 . k2, so lambda < 1 (lab.port.fit)
                size = torch.rand(weight.shape[-1:], generator=random) / math.sqrt(weight.shape[-1])
                weight.copy_(-size if role == "lambda_k1" and seed == 1 else size)
            elif weight.numel() == 1:
                weight.fill_(0.2 + 0.2 * torch.rand(1, generator=random).item())
            elif role == "norm":
                weight.copy_(1 + 0.3 * torch.randn(weight.shape, generator=random))
            else:
                fan_in = weight.shape[-2] if weight.ndim == 3 else weight.shape[-1]
                weight.copy_(torch.randn(weight.shape, generator=random) / math.sqrt(fan_in))
            letters = order if order and role in FUSED else [role]
            pieces = weight.chunk(len(letters)) if len(letters) > 1 else [weight]
            for letter, part in zip(letters, pieces):
                part *= {"q": 0.0 if flat else 1.5, "v": 30.0}.get(letter, 1.0)
                if part.ndim == 3:  # a matrix for each head, (h, C, d) or (h, d, C)
                    part = part.flatten(0, 1).T if letter == "o" else part.mT.flatten(0, 1)
                parts[letter].append(part.double())
        return parts

    def restore(self):
        for name, weight in self.before.items():
            self.weights[name].data.copy_(weight)

    def calls(self, T, C):
        """A text x (2, T, C), and those calls of the layer that run on it."""
        x = torch.randn(2, T, C, generator=torch.Generator().manual_seed(0))
        arguments = list(inspect.signature(self.layer.forward).parameters.values())[1:]
        wanted = [a.name for a in arguments if a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)
                  and (a.default is a.empty or re.search("mask|causal", a.name))]
        found = []
        for values in itertools.product(*[self.offers(name.lower(), T, C) for name in wanted]):
            if not one_table(dict(zip(wanted, values))):
                continue

            def call(x, values=values):
                given = {n: x if v is Stranger else v for n, v in zip(wanted, values)}
                y = self.layer(x, **given)
                return y[0] if isinstance(y, (tuple, list)) else y

            try:
                y = call(x)
                if y.shape == x.shape:
                    found.append(call)
                else:
                    self.problem = self.problem or f"it gives {tuple(y.shape)} for {tuple(x.shape)}"
            except Exception as problem:  # it wants something else
                self.problem = self.problem or f"{type(problem).__name__}: {problem}"
        return x, found

    def text(self):
        """The first text on which some calls run, and those calls."""
        widths = [n for weight in self.weights.values() for n in weight.shape]
        widths = sorted(set(widths), key=widths.count, reverse=True)
        lengths = [n for module in self.layer.modules() for n in vars(module).values()
                   if type(n) is int and 2 < n < 4096]
        for T, C in itertools.product([12] + lengths, widths):
            x, calls = self.calls(T, C)
            if calls:
                return x, calls
        raise PortError(f"the layer does not run: {self.problem}")

    def offers(self, name, T, C):
        """What an argument of forward may want, by its name."""
        later = torch.ones(T, T, dtype=torch.bool).triu(1)
        if "causal" in name:
            return [True]
        if "mask" in name:
            masks = [torch.zeros(T, T).masked_fill(later, -math.inf), ~later, later]
            shapes = [(T, T), (1, 1, T, T), (2, self.heads, T, T)]
            return [None] + [mask.expand(shape) for mask in masks for shape in shapes]
        if re.fullmatch("k|v|keys?|values?|kv|context|memory", name):
            return [Stranger]  # x itself
        if re.search("layer|depth|idx", name):
            return [self.depth]
        if re.search("lam|λ", name):
            return [self.lambda_init]
        offers = [None]
        for d in (C // self.heads, C // self.heads // 2):
            angle = torch.arange(T)[:, None] * 1e4 ** (-torch.arange(0, d, 2) / d)
            twice = torch.cat((angle, angle), -1)
            for a in (angle, twice, twice[None], angle.repeat_interleave(2, -1)):
                both = (a.cos(), a.sin())
                offers.append(both[0] if "cos" in name else both[1] if "sin" in name else both)
            offers.append(torch.polar(torch.ones_like(angle), angle))
        return offers

    def look(self, call, x):
        """{mistake: detail} of the mistakes that are seen from outside."""
        y = call(x)
        if not y.isfinite().all():
            return {"NaN": f"{1 - y.isfinite().float().mean():.0%} of them"}
        if distance(call(x), y).max() > TOLERANCE:
            return {"random": ""}
        seen = {}
        half = x.shape[1] // 2
        for token in (0, half, x.shape[1] - 1):
            other = x.clone()
            other[0, token] = x[1, token]
            moved = distance(call(other), y)
            if token == 0 and moved[0, 1:].max() < TOLERANCE:
                seen["no past"] = "Token 0 moves no other."
            if token > 0 and moved[0, :token].max() > TOLERANCE:
                first = moved[0, :token].argmax()
                seen["sees the future"] = (f"Token {token} moves token {first} by "
                                           f"{moved[0, first]:.2g} of the largest output.")
            if moved[1].max() > TOLERANCE:
                seen["mixes samples"] = f"By {moved[1].max():.2g} of the largest output."
        try:
            if not seen and distance(call(x[:, :half]), y[:, :half]).max() > TOLERANCE:
                seen["length"] = ""
        except Exception:
            pass  # a layer of one length
        return seen

    def looks(self, causal):
        """A text, the calls that leak least, and what is seen of the first one.

        Some calls give a mask, and some none: a layer is causal if it is so in one of these ways.
        """
        x, calls = self.text()
        seen = {}
        for call in calls:
            try:
                seen[call] = self.look(call, x)
            except Exception as problem:  # it ran once, but does not run again
                self.problem = f"{type(problem).__name__}: {problem}"
        if not seen:
            raise PortError(f"the layer does not run: {self.problem}")
        bad = {"NaN", "sees the future"} if causal else {"NaN"}
        leaks = {call: len(bad & set(seen[call])) for call in seen}
        calls = [call for call in seen if leaks[call] == min(leaks.values())]
        return x, calls, seen[calls[0]]

    def switch(self, call, x):
        """{"switch": detail} of a switch of the layer that changes its output, or {}."""
        y = call(x)
        for module in self.layer.modules():
            for name, value in list(vars(module).items()):
                if type(value) is bool and re.search("flash|fused|sdpa|train", name):
                    setattr(module, name, not value)
                    try:
                        other = call(x)
                        again = call(x)  # with dropout they differ
                        if (other == again).all() and distance(other, y).max() > TOLERANCE:
                            return {"switch": f"{name} = {not value}"}
                    except Exception:
                        pass  # a form that does not run here
                    finally:
                        setattr(module, name, value)
        return {}

    def dead(self, call, x):
        """The names of the matrices of which some rows have no gradient."""
        names = [name for name, weight in self.weights.items() if weight.ndim > 1]
        y = call(x)
        if not y.requires_grad:
            return []
        weights = [self.weights[name] for name in names]
        grads = torch.autograd.grad((y * x).sum(), weights, allow_unused=True)
        return [name for name, grad in zip(names, grads)
                if grad is None or not grad.abs().sum(-1).all()]


def sizes(parts, port, version):
    """The weights w by letter, and the sizes and numbers p of the paper's layer with them."""
    w = SimpleNamespace(exp_part=torch.zeros(1))
    for letter in "qkv":
        if not parts[letter]:
            raise PortError(f"I can't tell which weights are {letter}. Say names = "
                            f'{{"{letter}": ...}} with some of {", ".join(port.weights)}')
        setattr(w, letter, torch.cat(parts[letter]))
    p = SimpleNamespace(h=port.heads, factor=1.0, init=port.lambda_init)
    p.d = len(w.q) // p.h // 2
    p.kv = max(1, len(w.k) * version // p.d // 2)
    p.r = p.h // p.kv
    p.scale = math.sqrt(p.d)
    p.d_v = len(w.v) // p.kv
    if all(parts[role] for role in LAMBDAS):
        q1, k1, q2, k2 = [parts[role][0] for role in LAMBDAS]
        w.exp_part = ((q1 * k1).sum(-1).exp() - (q2 * k2).sum(-1).exp()).reshape(-1, 1, 1)
    w.gate = torch.cat([part for part in parts["lambda"] if part.ndim == 2] or [w.q])
    gains = [part.flatten() for part in parts["norm"] if part.numel() in (p.d_v, p.h * p.d_v)]
    p.has_gain = len(gains) > 0
    if len(gains) != p.h:  # not a norm for each head, but one, perhaps in two factors
        gains = [math.prod(gains[1:], start=gains[0])] if gains else [torch.ones(p.d_v).double()]
    w.norm = torch.cat(gains).reshape(-1, 1, p.d_v)
    w.norm = w.norm.expand(p.h, 1, p.d_v)
    w.o = torch.cat(parts["o"], 1) if parts["o"] else torch.eye(p.h * p.d_v).double()
    if w.o.shape[1] != p.h * p.d_v:
        raise PortError(f"{p.h} heads of {p.d_v} values are not {w.o.shape[1]} channels")
    return w, p


def one_table(given):
    """Whether the cosines and sines among arguments are those of the same angles."""
    cos = [value for name, value in given.items() if "cos" in name.lower()]
    sin = [value for name, value in given.items() if "sin" in name.lower()]
    if not cos or not sin or cos[0] is None or sin[0] is None or cos[0].shape != sin[0].shape:
        return not cos or not sin
    return (cos[0] ** 2 + sin[0] ** 2 - 1).abs().max() < 1e-3


def distance(a, b):
    """How far the tokens of a and b are apart, (B, T), in parts of the largest number."""
    return (a - b).abs().amax(-1) / b.abs().max()


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **_):
    """What flash_attn does, for q (B, T, H, d)."""
    r = q.shape[2] // k.shape[2]
    k = k.repeat_interleave(r, 2).transpose(1, 2)
    v = v.repeat_interleave(r, 2).transpose(1, 2)
    y = nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, is_causal=causal, scale=softmax_scale)
    return y.transpose(1, 2)


def apply_rotary_emb(q, cos, sin, interleaved=False, **_):
    return turn(q, cos[:, None], sin[:, None], interleaved)


def turn(q, cos, sin, interleaved):
    """The rotary embedding: pairs of neighbouring channels, or of the channels i and i + d/2."""
    a, b = (q[..., 0::2], q[..., 1::2]) if interleaved else q.chunk(2, -1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


class StandIn(mock.MagicMock):
    """In place of a package that is missing. As a decorator it does nothing."""

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and (inspect.isclass(args[0]) or inspect.isfunction(args[0])):
            return args[0]
        return super().__call__(*args, **kwargs)


def load(path, lines):
    """The names that a file and lines behind it define. A package that is missing is replaced."""
    try:
        names = read(path)
        for line in lines:
            exec(line, names)
        return names
    except Exception as problem:
        raise PortError(f"{path}: {type(problem).__name__}: {problem}") from problem


def read(path):
    folder = Path(path).resolve().parent
    sys.path[:0] = [str(folder)] + [str(parent) for parent in folder.parents]
    package = ""
    for place in (folder.parent.parent, folder.parent, folder):  # for imports like ..norm
        package += ".port" if package else "port"
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(place)]
    stand_in = StandIn(flash_attn_func=flash_attn_func, apply_rotary_emb=apply_rotary_emb)
    stand_in.__spec__ = ModuleSpec("flash_attn", None)
    sys.modules["flash_attn"] = stand_in  # it needs a GPU
    sys.modules["triton"] = None  # its kernels need a GPU, so whoever imports it is replaced
    code = compile(Path(path).read_text(encoding="utf-8"), path, "exec")
    replaced = []
    while True:
        names = {"__name__": package + ".it", "__package__": package, "__file__": path}
        try:
            exec(code, names)
            return names
        except ImportError as problem:
            frame = problem.__traceback__
            while frame.tb_next:
                frame = frame.tb_next
            name = problem.name
            if name in (None, "triton"):
                name = frame.tb_frame.f_globals["__name__"]
            if name in replaced or len(replaced) > 40:
                raise
            replaced.append(name)
            print(f"{name} can't be imported here, a stand-in is in its place")
            sys.modules[name] = stand_in
