"""Somebody's layer: its weights, how it is called, and its output for weights of ours."""
import inspect
import itertools
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from numbers import Integral

import torch

from model import ATTENTION, GPTConfig
from port import given
from port.paper import lambda_init_of
from port.problems import NOT_TORCH, USE_VECTORS, NoVerdict, how_far, say
from port.roles import ROLES, VECTORS, role_of, stacked_vectors

# what these weights are in a first draw, the same in all heads, so that 0 < lambda < 1. In another
# draw they are half of it: findings.py tells by both whether lambda has the paper's form
LAMBDAS = {"lambda_q1": 0.35, "lambda_k1": 0.3, "lambda_q2": 0.2, "lambda_k2": 0.1, "lambda": 0.4}


@dataclass(frozen=True)
class Reading:
    """What a layer is taken for: what its user said, or something else that is tried."""

    n_head: int
    depth: int
    version: int  # 1, 2, or 0 for plain softmax, which a user can't say
    causal: bool

    @property
    def heads(self):
        return self.n_head // 2 if self.version == 1 else self.n_head

    @property
    def lambda_init(self):
        return lambda_init_of(self.depth) if self.version == 1 else 0.0


@dataclass(frozen=True)
class Way:
    """A way to call a layer."""

    number: int  # among Port.offers
    arguments: dict  # what forward gets besides x


class Port:
    """A layer, its weights, and what its user said of them."""

    def __init__(self, layer, said, names):
        refuse_what_is_no_layer(layer)
        check(said)
        names = as_lists(names)
        self.is_function = not isinstance(layer, torch.nn.Module)
        self.layer = (as_module(layer, said) if self.is_function else layer).eval()
        self.arguments = given.wanted(self.layer.forward)
        self.said = said
        self.weights = {n: w for n, w in self.layer.named_parameters() if w.requires_grad}
        self.roles = {name: role_of(name, weight) for name, weight in self.weights.items()}
        self.told = set()  # names of weights whose role the user gave
        for role, some in names.items():
            for name in some:
                self.tell(role, name)
        letters = [role for role in self.roles.values() if re.fullmatch("[qkv]{2,}", role)]
        self.fused = letters[0] if letters else ""
        self.vectors_in = {}  # {name: [lambda_q1, ...]} of a weight that holds several of them
        self.transposed = frozenset()  # names of matrices whose rows are inputs
        self.unclear = frozenset()  # names of matrices of which we can't tell that
        self.problems = []  # what went wrong in calls

    def tell(self, role, name):
        if name not in self.weights or not ROLES.fullmatch(role):
            weights = ", ".join(self.weights)
            raise NoVerdict(f"names has {role!r}: {name!r}. Roles are q, k, v, several of them as "
                            f"qkv, o, lambda, lambda_q1 ..., gate, norm, qk_norm, bias, and the "
                            f"weights are {weights}")
        self.roles[name] = role
        self.told.add(name)

    def read_shapes(self, C):
        """Find roles that names do not tell: lambda's vectors in one weight, and W_O as the rest.

        The order of the vectors is a guess. lambdas.py mends it, once lambda is known.
        """
        if self.said.version == 1 and not set(VECTORS) & set(self.roles.values()):
            guesses = {n: w for n, w in self.weights.items() if n not in self.told}
            vectors = iter(VECTORS)
            for name, count in stacked_vectors(guesses, self.roles, C).items():
                self.roles[name] = "lambdas"
                self.vectors_in[name] = [next(vectors) for _ in range(count)]
        unknown = [name for name, role in self.roles.items() if role == "unknown"]
        if len(unknown) == 1 and "o" not in self.roles.values():
            self.roles[unknown[0]] = "o"

    def tells_n_head(self):
        """Whether the shape of a weight shows how many maps there are."""
        return bool({"lambda_q1", "lambdas", "gate"} & set(self.roles.values()))

    def has_lambda(self):
        return any(role.startswith("lambda") or role == "gate" for role in self.roles.values())

    def missing_roles(self):
        """What the paper's layer has, and no weight of this one was read as."""
        found = set(self.roles.values()).union(*self.vectors_in.values())
        for role in list(found):
            if re.fullmatch("[qkv]+", role):
                found |= set(role)
        expected = ["gate"] if self.said.version == 2 else ["norm", *VECTORS]
        return [role for role in ["q", "k", "v", "o", *expected] if role not in found]

    def draw(self, order="", seed=1, flat=False, without=(), lambdas=None, quiet=False):
        """Draw weights for the layer. Returns a Filled.

        Where its parts are used, read_shapes and transposed come first: they say which part is
        what, and how it lies.

        order: of the rows of a fused weight. Without it nothing of this weight is made larger, and
        it is one part. flat: W_q = 0, so that all maps are flat.
        without: names of weights that have no effect. They are drawn, and are nobody's part.
        lambdas: numbers in place of LAMBDAS. quiet: nothing is made larger.
        """
        random = torch.Generator().manual_seed(seed)
        # v is so large that the eps of a norm does not show
        loud = {"q": 0.0 if flat else 1.5, "v": 300.0, "bias": 0.0, "qk_norm": 0.0}
        if quiet:
            loud = {"bias": 0.0, "qk_norm": 0.0}
        if lambdas is None:
            lambdas = LAMBDAS if seed == 1 else {name: x / 2 for name, x in LAMBDAS.items()}
        drawn = {}
        parts = defaultdict(list)
        for name, weight in self.weights.items():
            role = self.roles[name]
            size = math.sqrt(max(weight.shape, default=1))
            new = torch.randn(weight.shape, generator=random) / size
            letters = self.vectors_in.get(name, [role])
            if order and role == self.fused:
                letters = order
            outputs = 1 if name in self.transposed else 0  # the dimension that holds them
            for letter, part in zip(letters, torch.atleast_1d(new).chunk(len(letters), outputs)):
                if letter in lambdas:
                    part.fill_(lambdas[letter] / math.sqrt(part.shape[-1]))
                part *= loud.get(letter, 1.0)
                part += letter in ("norm", "qk_norm")
                if name not in without:
                    parts[letter].append(rows_of(part, letter).double().transpose(0, outputs))
            drawn[name] = new.requires_grad_()
        return Filled(self, drawn, parts)

    def input(self, T, C):
        return torch.randn(2, T, C, generator=torch.Generator().manual_seed(0))

    def ways(self):
        """A text x (2, T, C), and [Way, ...]: those that run on it, of equal outputs one."""
        filled = self.draw()
        numbers = [n for m in self.layer.modules() for n in vars(m).values() if type(n) is int]
        lengths = [n for n in numbers if 1 < n <= 4096]
        widths = [n for weight in self.weights.values() for n in weight.shape[-2:]]
        likely_widths = sorted(set(widths), key=widths.count, reverse=True)
        for T, C in itertools.product([12] + lengths, likely_widths):
            x = self.input(T, C)
            found = []  # [(output, Way), ...]
            for number, arguments in enumerate(self.offers(T, C)):
                y = filled.run(arguments, x)
                if y is not None:  # of equal ones the last counts: a layer may keep an old mask
                    found = [old for old in found if not is_equal(old[0], y)]
                    found.append((y, Way(number, arguments)))
            if found:
                return x, [way for _, way in found]
        raise NoVerdict(self.why_it_does_not_run())

    def offers(self, T, C):
        """[arguments of forward, ...] of those offers that differ in what the layer takes."""
        found = []
        said = self.said
        for offer in given.offers(T, C, said.heads, said.depth, said.lambda_init):
            arguments = given.choose(offer, self.arguments)
            if not any(are_the_same(arguments, others) for others in found):
                found.append(arguments)
        return found

    def why_it_does_not_run(self):
        if not self.weights:
            return "the layer has no weights that can be trained (requires_grad)"
        said = [say(self.problems[0]), say(max(self.problems, key=how_far))]
        text = "the layer does not run: " + "; or: ".join(dict.fromkeys(said))
        looks_foreign = re.search(r"numpy|ndarray|jax|mlx", text, re.IGNORECASE)
        return f"{text}. {USE_VECTORS}" if looks_foreign else text


@dataclass
class Filled:
    """A port with weights: what runs."""

    port: Port
    weights: dict  # {name: tensor}
    parts: dict | None = None  # {role: [part, ...]} of them, in float64, if they were drawn

    def run(self, arguments, x):
        """The output, the first one if there are several, or None where such a call fails.

        Why it failed is kept in port.problems.
        """
        given_x = {name: x if value is given.X else value for name, value in arguments.items()}
        try:
            y = torch.func.functional_call(self.port.layer, self.weights, (x,), given_x)
            y = y[0] if isinstance(y, (tuple, list)) else y
            if not isinstance(y, torch.Tensor):
                kind = type(y)
                raise TypeError(f"it gives a {kind.__module__}.{kind.__name__}, and no tensor")
            if y.shape != x.shape:
                raise ValueError(f"it gives {tuple(y.shape)} for {tuple(x.shape)}")
            return y.float()
        except Exception as problem:  # it wants something else
            self.port.problems.append(problem)
            return None


def rows_of(part, letter):
    """A part of a weight as (outputs, inputs), and lambda's vectors as (1 or h, d)."""
    if letter in VECTORS:
        return part.reshape(-1, part.shape[-1])
    if part.ndim == 3:  # a matrix for each head, (h, C, d) or (h, d, C)
        return part.flatten(0, 1).T if letter == "o" else part.mT.flatten(0, 1)
    if part.ndim > 3:  # as (h, 2, d, C)
        return part.flatten(0, -2)
    return part


def refuse_what_is_no_layer(layer):
    """NoVerdict, with advice, for what is neither a module nor a function of tensors."""
    if layer is None or inspect.isclass(layer):
        raise NoVerdict("there is no layer: add layer = YourAttention(...) with its sizes")
    if isinstance(layer, torch.nn.Module):
        return
    packages = [kind.__module__.split(".")[0] for kind in type(layer).__mro__]
    foreign = [name for name in packages if name in NOT_TORCH]
    if foreign:
        raise NoVerdict(f"the layer is made with {foreign[0]}. {USE_VECTORS}")
    if not callable(layer):
        raise NoVerdict("layer is neither a torch.nn.Module nor a function layer(x, w)")
    arguments = inspect.signature(layer).parameters.values()
    places = [a for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    takes_any = any(a.kind is a.VAR_POSITIONAL for a in arguments)
    if len(places) < 2 and not takes_any:
        raise NoVerdict(f"layer is a {type(layer).__name__}, and no torch.nn.Module. A function of "
                        f"tensors takes two arguments, layer(x, w). {USE_VECTORS}")


def check(said):
    """Refuse what can't be meant, with a sentence."""
    for name in ("n_head", "depth", "version"):
        number = getattr(said, name)
        if not isinstance(number, Integral) or isinstance(number, bool):
            raise NoVerdict(f"{name} is a whole number, not {number!r}")
    if not isinstance(said.causal, bool):
        raise NoVerdict(f"causal is True or False, not {said.causal!r}")
    if said.depth < 0:
        raise NoVerdict(f"depth counts the layers from 0, so it can't be {said.depth}")
    if said.version not in (1, 2):
        raise NoVerdict(f"version is 1 or 2, not {said.version!r}")
    if said.n_head < 1 or said.n_head * said.version % 2 != 0:
        raise NoVerdict("n_head counts maps, two for each head: it is even, and not "
                        f"{said.n_head}")


def as_lists(names):
    """{role: [name, ...]} of what the user said, which may be one name for a role, or None."""
    refusal = NoVerdict('names is {role: a name or a list of names}, as {"q": "W_q.weight"}, and '
                        f"not {names!r}")
    if names is None:
        return {}
    if not isinstance(names, dict):
        raise refusal
    found = {}
    for role, some in names.items():
        found[role] = [some] if isinstance(some, str) else some
        if not isinstance(found[role], (list, tuple)):
            raise refusal
        for name in (role, *found[role]):
            if not isinstance(name, str):
                raise refusal
    return found


def as_module(function, said):
    """A module whose forward is function(x, w), w being weights with Microsoft's names."""
    arm = "diff_v2" if said.version == 2 else "diff"
    config = GPTConfig(attn=arm, n_head=said.n_head, n_embd=8 * said.n_head)
    module = ATTENTION[arm](config, said.depth)
    module.forward = lambda x: function(x, dict(module.named_parameters()))
    return module


def are_the_same(arguments, others):
    """Whether the very same tensors and numbers are given."""
    return all(arguments[name] is others[name] for name in arguments)


def is_equal(a, b):
    largest = b.nan_to_num().abs().max().item()
    return torch.allclose(a, b, rtol=0, atol=1e-4 * largest, equal_nan=True)
