"""What is seen of a layer from outside, whatever its weights are called and however it is made."""
import itertools
import re

import torch

from port import given
from port.roles import in_short

LONGER = (272, 136, 34)  # tokens. Layers that work in pieces have pieces of 16 to 256
IS_SWITCH = "flash|fused|sdpa|triton|kernel|train"


def apart(a, b):
    """How far the tokens of a and b are apart, (B, T), relative to the largest number of b."""
    return ((a - b).abs().amax(-1) / b.abs().max()).detach()


def rounding(port, way, x):
    """How far the layer's own rounding moves its output, relative to the largest number of it.

    A smooth function moves by as much for x + dx as it does back for x - dx, but for a millionth.
    What is left of the sum of both is rounding: 1e-6 in float32, 1e-3 where it casts to float16.
    """
    y = port.run(way, x)
    if not y.isfinite().all() or not torch.equal(port.run(way, x), y):
        return 0.0
    found = []
    for seed in range(5):
        dx = 3e-4 * x * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        ahead, back = port.run(way, x + dx), port.run(way, x - dx)
        found.append(apart(ahead + back, 2 * y).max().item())
    return sorted(found)[2]  # the median: a kink, as of a relu, shows in few of them


def look(port, way, x):
    """{mistake: detail} of the layer, as it is called in this way."""
    y = port.run(way, x)
    if not y.isfinite().all():
        return {"NaN": ""}
    if apart(port.run(way, x), y).max() > port.tolerance:
        return {"random": ""}
    seen = look_at_tokens(port, way, x, y)
    dead = [set(without_gradient(port, way, x, seed)) for seed in (1, 2)]
    port.draw()
    dead = [name for name in port.weights if name in dead[0] & dead[1]]
    norms = [name for name in dead if port.roles[name] == "norm"]
    others = [name for name in dead if port.roles[name] != "norm"]
    seen |= {"unused norm": ", ".join(in_short(norms))} if norms else {}
    seen |= {"dead weights": ", ".join(in_short(others))} if others else {}
    switch = switch_that_matters(port, way, x, y)
    return seen | ({"switch": switch} if switch else {})


def look_at_tokens(port, way, x, y):
    """What a change of one token, or the end of the text, does to the others."""
    T = x.shape[1]
    moved = torch.zeros(T, 2, T)  # [i, b, j]: token j of sample b, by token i of sample 0
    for i in range(T):
        other = x.clone()
        other[0, i] = x[1, i]
        moved[i] = apart(port.run(way, other), y)
    later, earlier = moved[:, 0].triu(1), moved[:, 0].tril(-1)  # than the changed token
    prefix = port.run(way, x[:, : T // 2])
    seen = {}
    if port.causal and earlier.max() > port.tolerance:
        i, j = divmod(earlier.argmax().item(), T)
        seen["sees the future"] = f"Token {i} moves token {j} by {earlier.max():.1%}."
        if earlier[torch.ones(T, T).tril(-1) == 1].min() > port.tolerance:
            seen["sees the future"] += (" Each token moves all earlier ones. If the layer is an "
                                        "encoder, say causal = False.")
    elif port.causal and prefix is not None:
        if apart(prefix, y[:, : T // 2]).max() > port.tolerance:
            seen["length"] = ""
    if later.max() < port.tolerance:
        seen["no past"] = ""
    if moved[:, 1].max() > port.tolerance:
        seen["mixes samples"] = f"By {moved[:, 1].max():.1%}."
    return seen


def sees_the_last_token(port, way, x):
    """Whether earlier outputs depend on the last token."""
    other = x.clone()
    other[:, -1] = other[:, -1].flip(0)
    return apart(port.run(way, other), port.run(way, x))[:, :-1].max() > port.tolerance


def uses_order(port, way, x):
    """Whether the last token's output depends on the order of the tokens before it."""
    order = [*reversed(range(x.shape[1] - 1)), x.shape[1] - 1]
    changed = port.run(way, x[:, order])
    return changed is None or apart(changed, port.run(way, x))[:, -1].max() > port.tolerance


def look_further(port, x):
    """{"sees the future": detail}, if a longer text shows a leak that x is too short for."""
    for T, number in itertools.product(LONGER, port.way_numbers):
        longer = port.input(T, x.shape[2])
        way = port.offers(T, x.shape[2])[number]
        y = port.run(way, longer)
        if y is None or not y.isfinite().all():
            continue  # it can't read so much
        for start in (T // 3, T // 2 + 1, T - 1):
            other = longer.clone()
            other[:, start:] = other[:, start:].flip(0)  # the rest of the other sample
            moved = apart(port.run(way, other), y)[:, :start].amax(0)
            if moved.max() > port.tolerance:
                j = moved.argmax().item()
                return {"sees the future": f"In a text of {T} tokens the ones from {start} on move "
                                           f"token {j} by {moved[j]:.1%}."}
        return {}
    return {}


def without_gradient(port, way, x, seed):
    """Names of the weights of which some row has no effect on the output."""
    port.draw(seed=seed)
    y = port.run(way, x)
    weights = {}
    for name, weight in port.drawn.items():
        role = port.roles[name]
        if weight.ndim > 1 or "lambda" in role or role == "norm":
            weights[name] = weight
    if not y.requires_grad:
        return list(weights)
    gradients = torch.autograd.grad((y * x).sum(), list(weights.values()), materialize_grads=True)
    return [name for name, g in zip(weights, gradients) if not g.any(-1).all()]


def switch_that_matters(port, way, x, y):
    """The name of a switch that changes the output, of a module's or of forward's, or ""."""
    for module, name in [(m, name) for m in port.layer.modules() for name in vars(m)]:
        value = getattr(module, name)
        if type(value) is bool and re.search(IS_SWITCH, name):
            setattr(module, name, not value)
            matters = matters_now(port, way, x, y)
            setattr(module, name, value)
            if matters:
                return name
    for name, value in given.boolean_arguments(port.layer.forward).items():
        if re.search(IS_SWITCH, name) and matters_now(port, way | {name: not value}, x, y):
            return name
    return ""


def matters_now(port, way, x, y):
    z, again = port.run(way, x), port.run(way, x)  # equal without dropout
    return z is not None and torch.equal(z, again) and apart(z, y).max() > port.tolerance


def starts_from_zeros(port, way, x):
    """Names of the layer's own weights that are 0 and stay 0 in training, as their gradient is 0.

    They are looked at after four steps, since others may start from 0 and leave it.
    """
    if port.is_function:  # it has no weights of its own
        return []
    weights = {}
    for name, weight in port.weights.items():
        weights[name] = weight.detach().float().clone().requires_grad_()
    port.drawn = weights
    for _ in range(4):
        y = port.run(way, x)
        if y is None or not y.requires_grad or not y.isfinite().all():
            return []
        loss = (y - x.flip(-1)).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        with torch.no_grad():
            for weight, gradient in zip(weights.values(), gradients):
                weight -= 0.1 * gradient / gradient.norm().clamp(min=1e-12)
    return [name for name, weight in weights.items()
            if port.roles[name] not in ("bias", "norm") and not weight.any()]
