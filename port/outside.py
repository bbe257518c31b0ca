"""What is seen of a layer from outside, whatever its weights are called and however it is made."""
import itertools
import re
from dataclasses import dataclass, replace

import torch

from port import given
from port.roles import in_short
from port.theirs import Filled

LONGER = (272, 136, 34)  # tokens. Layers that work in pieces have pieces of 16 to 256
TOLERANCE = 1e-5  # of the largest output. float32 makes 2e-6
NOT_SOUND = {"NaN", "random", "mixes samples"}  # then nothing else is looked at or compared
IS_SWITCH = "flash|fused|sdpa|triton|kernel|train"


def apart(a, b):
    """How far the tokens of a and b are apart, (B, T), relative to the largest number of b."""
    return ((a - b).abs().amax(-1) / b.abs().max()).detach()


def rounding(filled, way, x):
    """How far the layer's own rounding moves its output, relative to the largest number of it.

    For a smooth f, f(x + dx) + f(x - dx) is 2 f(x), but for a millionth.
    What is left of the sum of both is rounding: 1e-6 in float32, 1e-3 where it casts to float16.
    """
    y = filled.run(way.arguments, x)
    if not y.isfinite().all() or not torch.equal(filled.run(way.arguments, x), y):
        return 0.0
    found = []
    for seed in range(5):
        dx = 3e-4 * x * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        ahead, back = filled.run(way.arguments, x + dx), filled.run(way.arguments, x - dx)
        found.append(apart(ahead + back, 2 * y).max().item())
    return sorted(found)[2]  # the median: a kink, as of a relu, shows in few of them


@dataclass(frozen=True)
class Seen:
    """What looking at a layer from outside has found."""

    filled: Filled  # the port with the weights for which it was looked at
    x: torch.Tensor  # and the text
    ways: list  # those ways to call the layer in which least is wrong
    tolerance: float  # what is nearer than this counts as equal, relative to the largest output
    mistakes: dict  # {name of a mistake: detail}
    unused_norms: frozenset = frozenset()  # names of weights of norms that have no effect
    sees_future: bool = False  # within x: a longer text may show another leak
    uses_order: bool = True  # the order of earlier tokens matters

    @property
    def rounds(self):
        """To float16 or bfloat16."""
        return self.tolerance > 1e-4  # float32 makes less, also where A_1 - lambda A_2 is small


def look(port, x, ways):
    """Seen, in the best ways to call the layer.

    Some ways give a mask, and some none, so the ones in which least is wrong are meant.
    """
    filled = port.draw()
    tolerance = max(TOLERANCE, 4 * rounding(filled, ways[0], x))
    found = [look_in_one_way(port, Seen(filled, x, [way], tolerance, {})) for way in ways]
    best = min(found, key=lambda seen: len(seen.mistakes))
    ways = [seen.ways[0] for seen in found if len(seen.mistakes) == len(best.mistakes)]
    best = replace(best, ways=ways)
    if port.said.causal and best.mistakes.keys().isdisjoint(NOT_SOUND) and not best.sees_future:
        best = replace(best, mistakes=look_further(port, best) | best.mistakes)
    if best.rounds and best.mistakes.keys().isdisjoint(NOT_SOUND):
        best = replace(best, mistakes=overflow(port, best) | best.mistakes)
    return replace(best, uses_order=any(uses_order(best, way) for way in best.ways))


def look_in_one_way(port, seen):
    """Seen, of a layer that is called in the only way of seen."""
    x, way = seen.x, seen.ways[0]
    y = seen.filled.run(way.arguments, x)
    if not y.isfinite().all():
        return replace(seen, mistakes={"NaN": ""})
    if apart(seen.filled.run(way.arguments, x), y).max() > seen.tolerance:
        return replace(seen, mistakes={"random": ""})
    mistakes = look_at_tokens(port, seen, y)
    dead = dead_weights(port, way, x)
    norms = [name for name in dead if port.roles[name] == "norm"]
    others = [name for name in dead if port.roles[name] != "norm"]
    if norms:
        mistakes["unused norm"] = ", ".join(in_short(norms))
    if others:
        mistakes["dead weights"] = ", ".join(in_short(others))
    switch = switch_that_matters(port, seen, y)
    if switch:
        mistakes["switch"] = switch
    return replace(seen, mistakes=mistakes, unused_norms=frozenset(norms),
                   sees_future="sees the future" in mistakes)


def look_at_tokens(port, seen, y):
    """{mistake: detail}: what a change of one token, or of the length, does to the others."""
    x, way = seen.x, seen.ways[0]
    T = x.shape[1]
    moved = torch.zeros(T, 2, T)  # [i, b, j]: token j of sample b, by token i of sample 0
    for i in range(T):
        other = x.clone()
        other[0, i] = x[1, i]
        moved[i] = apart(seen.filled.run(way.arguments, other), y)
    later, earlier = moved[:, 0].triu(1), moved[:, 0].tril(-1)  # than the changed token
    prefix = seen.filled.run(way.arguments, x[:, : T // 2])
    found = {}
    if port.said.causal and earlier.max() > seen.tolerance:
        i, j = divmod(earlier.argmax().item(), T)
        found["sees the future"] = f"Token {i} moves token {j} by {earlier.max():.1%}."
        if earlier[torch.ones(T, T).tril(-1) == 1].min() > seen.tolerance:
            found["sees the future"] += (" Each token moves all earlier ones. If the layer is an "
                                         "encoder, say causal = False.")
    elif port.said.causal and prefix is not None:
        if apart(prefix, y[:, : T // 2]).max() > seen.tolerance:
            found["length"] = ""
    if later.max() < seen.tolerance:
        found["no past"] = ""
    if moved[:, 1].max() > seen.tolerance:
        found["mixes samples"] = f"By {moved[:, 1].max():.1%}."
    return found


def sees_the_last_token(seen):
    """Whether earlier outputs depend on the last token, in any way to call the layer."""
    other = seen.x.clone()
    other[:, -1] = other[:, -1].flip(0)
    for way in seen.ways:
        moved = apart(seen.filled.run(way.arguments, other),
                      seen.filled.run(way.arguments, seen.x))
        if moved[:, :-1].max() > seen.tolerance:
            return True
    return False


def uses_order(seen, way):
    """Whether the last token's output depends on the order of the tokens before it."""
    last = seen.x.shape[1] - 1
    order = [*reversed(range(last)), last]
    changed = seen.filled.run(way.arguments, seen.x[:, order])
    if changed is None:
        return True
    return apart(changed, seen.filled.run(way.arguments, seen.x))[:, -1].max() > seen.tolerance


def look_further(port, seen):
    """{"sees the future": detail}, if a longer text shows a leak that x is too short for."""
    C = seen.x.shape[2]
    for T, way in itertools.product(LONGER, seen.ways):
        longer = port.input(T, C)
        arguments = port.offers(T, C)[way.number]
        y = seen.filled.run(arguments, longer)
        if y is None or not y.isfinite().all():
            continue  # it can't read so much
        for start in (T // 3, T // 2 + 1, T - 1):
            other = longer.clone()
            other[:, start:] = other[:, start:].flip(0)  # the rest of the other sample
            moved = apart(seen.filled.run(arguments, other), y)[:, :start].amax(0)
            if moved.max() > seen.tolerance:
                j = moved.argmax().item()
                return {"sees the future": f"In a text of {T} tokens the ones from {start} on move "
                                           f"token {j} by {moved[j]:.1%}."}
        return {}
    return {}


def overflow(port, seen):
    """{"overflow": detail}, if larger inputs give no numbers, with weights as at a usual start."""
    quiet = port.draw(quiet=True)
    for times in (10, 30):
        y = quiet.run(seen.ways[0].arguments, times * seen.x)
        if y is not None and not y.isfinite().all():
            return {"overflow": f"Here they are {times} times as large as behind a norm."}
    return {}


def how_matrices_lie(port, way, x):
    """(names of those whose rows are inputs, as in x @ W; names of those where it is not clear).

    The rows of a Linear are outputs. Where x is 0 but for its first channel, a matrix that is
    multiplied by x has a gradient only where it meets this channel: in its first row or its first
    column. For W_O the same holds of the first channel of the output.
    """
    filled = port.draw()
    first = torch.zeros(x.shape[2])
    first[0] = 1
    from_x = gradients(filled, way, first * x, x)
    to_y = gradients(filled, way, x, first * x)
    if not from_x or not to_y:
        return frozenset(), frozenset()
    transposed, unclear = [], []
    for name, role in port.roles.items():
        if port.weights[name].ndim != 2 or not re.fullmatch("[qkv]+|gate|o", role):
            continue
        gradient = to_y[name].T if role == "o" else from_x[name]  # its rows are inputs if W's are
        in_first_row = not gradient[1:].any()
        in_first_column = not gradient[:, 1:].any()
        if in_first_row and not in_first_column:
            transposed.append(name)
        elif not in_first_column:
            unclear.append(name)
    return frozenset(transposed), frozenset(unclear)


def gradients(filled, way, x, slope):
    """{name: gradient of a weight}, of the output for x times slope. {} if it has none."""
    y = filled.run(way.arguments, x)
    if y is None or not y.requires_grad:
        return {}
    found = torch.autograd.grad((y * slope).sum(), list(filled.weights.values()),
                                materialize_grads=True)
    return dict(zip(filled.weights, found))


def dead_weights(port, way, x):
    """Names of the weights that have no effect in two draws of them."""
    first = without_gradient(port, way, x, seed=1)
    second = without_gradient(port, way, x, seed=2)
    return [name for name in first if name in second]


def without_gradient(port, way, x, seed):
    """Names of the weights of which some row, or column if transposed, has no effect."""
    filled = port.draw(seed=seed)
    slopes = gradients(filled, way, x, slope=x)
    found = []
    for name, weight in filled.weights.items():
        role = port.roles[name]
        if weight.ndim > 1 or "lambda" in role or role == "norm":
            inputs = 0 if name in port.transposed else -1  # the dimension that holds them
            if not slopes or not slopes[name].any(inputs).all():
                found.append(name)
    return found


def switch_that_matters(port, seen, y):
    """The name of a switch that changes the output, of a module's or of forward's, or ""."""
    arguments = seen.ways[0].arguments
    for module, name in [(m, name) for m in port.layer.modules() for name in vars(m)]:
        value = getattr(module, name)
        if type(value) is bool and re.search(IS_SWITCH, name):
            setattr(module, name, not value)
            matters = matters_now(arguments, seen, y)
            setattr(module, name, value)
            if matters:
                return name
    for name, value in given.boolean_arguments(port.layer.forward).items():
        if re.search(IS_SWITCH, name) and matters_now(arguments | {name: not value}, seen, y):
            return name
    return ""


def matters_now(arguments, seen, y):
    z = seen.filled.run(arguments, seen.x)
    again = seen.filled.run(arguments, seen.x)  # equal without dropout
    return z is not None and torch.equal(z, again) and apart(z, y).max() > seen.tolerance


def starts_from_zeros(port, way, x):
    """Names of the layer's own weights that are 0 and stay 0 in training, as their gradient is 0.

    They are looked at after four steps, since others may start from 0 and leave it.
    """
    if port.is_function:  # it has no weights of its own
        return []
    weights = {}
    for name, weight in port.weights.items():
        weights[name] = weight.detach().float().clone().requires_grad_()
    filled = Filled(port, weights)
    for _ in range(4):
        y = filled.run(way.arguments, x)
        if y is None or not y.requires_grad or not y.isfinite().all():
            return []
        loss = (y - x.flip(-1)).square().mean()
        slopes = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        with torch.no_grad():
            for weight, gradient in zip(weights.values(), slopes):
                weight -= 0.1 * gradient / gradient.norm().clamp(min=1e-12)
    return [name for name, weight in weights.items()
            if port.roles[name] not in ("bias", "norm") and not weight.any()]
