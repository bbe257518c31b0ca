"""What is seen of a layer whatever it computes: later tokens, dead weights, how matrices lie."""
import inspect
import re
from dataclasses import dataclass

import torch

from port.reading import calls_of, lengths, text
from port.roles import NoVerdict, in_short

FATAL = {"NaN", "random", "mixes samples", "no past"}  # these are not compared with the paper
SWITCH = "flash|sdpa|triton|(fused|kernel)s?(_?attn|_?attention)?$"


@dataclass(frozen=True)
class Seen:
    x: torch.Tensor
    calls: list  # [(number, what forward is given besides x), ...]: those in which least is wrong
    mistakes: dict  # {name: detail}
    tolerance: float  # outputs that are nearer count as equal
    leaks: bool  # within x: a longer text may show another leak
    lengths: list  # numbers of tokens of other texts that it can read
    h: int  # heads, by which the calls were made

    @property
    def given(self):
        return self.calls[0][1]

    @property
    def is_sound(self):
        return not self.mistakes.keys() & FATAL


def apart(a, b):
    """How far the tokens of a and b are apart, (B, T), relative to the largest number of b."""
    return ((a - b).abs().amax(-1) / b.abs().max().clamp(min=1e-30)).detach()


def look(theirs, x, calls, h):
    """Seen, in those of the calls in which least is wrong: some give a mask."""
    looks = [(*look_at_one(theirs, x, given), (number, given)) for number, given in calls]
    least = min(len(mistakes) for mistakes, _, _ in looks)
    looks = [one for one in looks if len(one[0]) == least]
    mistakes, tolerance, (number, given) = looks[0]
    leaks, readable = "sees the future" in mistakes, []
    if not mistakes.keys() & FATAL:
        run = runner(theirs, given)
        if not theirs.causal and sees_the_future(run, x, tolerance) is None:
            raise NoVerdict("is causal = True meant? No token sees a later one")
        readable, late = in_other_texts(theirs, x.shape[2], number, h, tolerance)
        mistakes = late | other_ways(theirs, x, given, tolerance) | mistakes
    return Seen(x, [call for _, _, call in looks], mistakes, tolerance, leaks, readable, h)


def in_other_texts(theirs, C, number, h, tolerance):
    """([length, ...] that the layer can read, the longest first, {name of a mistake: detail})."""
    readable, found = [], {}
    for T in (*lengths(theirs, h, C), 2, 1):
        x, given = text(T, C), calls_of(theirs, T, C, h)[number]
        run = runner(theirs, given)
        if run(x) is None:
            continue
        if not readable:  # it is the longest
            found |= as_it_trains(theirs, x, given, tolerance)
        readable.append(T)
        leak = sees_the_future(run, x, tolerance) if theirs.causal else None
        if leak and "sees the future" not in found:
            found["sees the future"] = leak
    return readable, found


def runner(theirs, given):
    """The layer with weights of ours, as a function of x."""
    weights, _ = theirs.draw()
    return lambda x: theirs.run(weights, x, given)


def look_at_one(theirs, x, given):
    """({name of a mistake: detail}, tolerance), of a layer that is called in one way."""
    run = runner(theirs, given)
    y = run(x)
    if not y.isfinite().all():
        return {"NaN": ""}, 1e-5
    if any(apart(run(x), y).max() > 1e-5 for _ in range(5)):
        return {"random": ""}, 1e-5
    tolerance = tolerance_of(run, x)
    dead = dead_weights(theirs, x, given)
    norms = {name for name in dead if theirs.roles[name] == "norm"}
    weights, _ = theirs.draw()
    with_dropout = theirs.run(weights, x, given, dropout=True)
    found = {
        "mixes samples": mixes_samples(run, x, tolerance),
        "no past": no_past(run, x, tolerance),
        "sees the future": sees_the_future(run, x, tolerance) if theirs.causal else None,
        "dropout": "" if apart(with_dropout, y).max() > tolerance else None,
        "dead weights": in_short(dead - norms) or None,
        "unused norm": in_short(norms) or None,
    }
    return {name: detail for name, detail in found.items() if detail is not None}, tolerance


def tolerance_of(run, x):
    """What counts as equal: more if the layer rounds to float16 or bfloat16 inside.

    f(x + dx) + f(x - dx) is 2 f(x) for a smooth f, and what is left is rounding.
    """
    y, found = run(x), []
    for seed in range(5):
        dx = 3e-4 * x * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        found.append(apart(run(x + dx) + run(x - dx), 2 * y).max().item())
    return max(1e-5, 4 * sorted(found)[2])  # the median: a kink shows in few of them


# ---- what tokens see. None: it is as it should be. Else more about it, or ""

def sees_the_future(run, x, tolerance):
    y = run(x)
    if not y.isfinite().all():
        return None
    T = x.shape[1]
    for start in sorted({T - 1, T // 2 + 1, T // 3, 1} - {0, T}, reverse=True):
        other = x.clone()
        other[:, start:] = x[:, start:].flip(0)  # those of the other sample
        moved = apart(run(other), y)[:, :start].amax(0)
        if moved.max() > tolerance:
            return (f"In a text of {T} tokens those from {start} on move token "
                    f"{moved.argmax().item()} by {moved.max():.1%}.")
    return None


def mixes_samples(run, x, tolerance):
    y = run(x)
    for batch in ([0], [1, 1], [1, 0, 1]):
        other = run(x[batch])
        if other is not None and apart(other, y[batch]).max() > tolerance:
            return ""
    return None


def no_past(run, x, tolerance):
    other = x.clone()
    other[:, :-1] = x[:, :-1].flip(0)
    return "" if apart(run(other), run(x))[:, -1].max() < tolerance else None


# ---- other ways to run: train(), flags, larger numbers

def other_ways(theirs, x, given, tolerance):
    """{name: detail}"""
    found = as_it_trains(theirs, x, given, tolerance)
    switch = switch_that_matters(theirs, x, given, tolerance)
    if switch:
        found["switch"] = switch
    rounds = tolerance > 1e-4
    if rounds:
        found["rounding"] = ""
    if overflows(theirs, x, given):
        found["overflow" if rounds else "large scores"] = ""
    weights, _ = theirs.draw()
    inner = x.clone()
    theirs.call(weights, inner, given)
    if not torch.equal(inner, x):
        found["writes into x"] = ""
    return found


def as_it_trains(theirs, x, given, tolerance):
    """{name: detail} of what train() changes. Dropouts are taken out."""
    run = runner(theirs, given)
    y = run(x)

    def run_seeded(x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return run(x)

    theirs.layer.train()
    try:
        state = torch.get_rng_state()
        z, again = run(x), run(x)
        if z is None:
            return {"unclear as it trains": f"There it fails: {theirs.problems[-1]}."}
        is_random = not torch.equal(z, again) or not torch.equal(state, torch.get_rng_state())
        if not is_random and apart(z, y).max() <= tolerance:
            dead = {n for n in dead_weights(theirs, x, given) if theirs.roles[n] != "norm"}
            return {"dead weights": f"As it trains: {in_short(dead)}"} if dead else {}
        if torch.equal(run_seeded(x), run_seeded(x)) and theirs.causal:
            leak = sees_the_future(run_seeded, x, tolerance)
            if leak:
                return {"sees the future": f"As it trains. {leak}"}
        if is_random:
            return {"unclear as it trains": "Something random runs there that is no dropout."}
        return {"switch": "train()"}
    finally:
        theirs.layer.eval()


def switch_that_matters(theirs, x, given, tolerance):
    """The name of a switch, of a module's or of forward's, that changes the output, or ""."""
    y = runner(theirs, given)(x)

    def matters(given):
        run = runner(theirs, given)
        z, again = run(x), run(x)
        return z is not None and torch.equal(z, again) and not apart(z, y).max() <= tolerance

    for name, argument in inspect.signature(theirs.layer.forward).parameters.items():
        if type(argument.default) is bool and re.search(SWITCH, name):
            if matters(given | {name: not argument.default}):
                return name
    for module, name in [(m, name) for m in theirs.layer.modules() for name in vars(m)]:
        value = getattr(module, name)
        if type(value) is bool and re.search(SWITCH, name):
            setattr(module, name, not value)
            is_other = matters(given)
            setattr(module, name, value)
            if is_other:
                return name
    return ""


def overflows(theirs, x, given):
    """Whether its own weights give no numbers for larger inputs."""
    usual, large = (theirs.run(theirs.weights, times * x, given) for times in (1, 30))
    return (usual is not None and large is not None
            and bool(usual.isfinite().all()) and not large.isfinite().all())


def is_a_block(theirs, x, given):
    """Whether the layer gives something even where all its matrices are 0."""
    weights, _ = theirs.draw()
    y = theirs.run({n: torch.zeros_like(w) if w.ndim > 1 else w for n, w in weights.items()}, x,
                   given)
    return y is not None and y.isfinite().all() and y.abs().max() > 1e-6


# ---- what gradients show

def gradients(theirs, weights, x, given, slope):
    """{name: gradient} of the output times slope. {} where there is none."""
    y = theirs.run(weights, x, given)
    if y is None or not y.requires_grad:
        return {}
    try:
        found = torch.autograd.grad((y * slope).sum(), list(weights.values()),
                                    materialize_grads=True)
    except RuntimeError as problem:  # a step in place, for one
        raise NoVerdict(f"it can't be trained, as its gradient fails: {problem}") from problem
    return dict(zip(weights, found))


def dead_weights(theirs, x, given):
    """Names of the weights of which some row has no effect in either of two draws."""
    first, second = [without_gradient(theirs, x, given, number) for number in (0, 1)]
    return set(first) & set(second)


def without_gradient(theirs, x, given, number):
    """Names of the weights of which some row has no effect."""
    weights, _ = theirs.draw(number)
    slopes = gradients(theirs, weights, x, given, slope=x)
    found = []
    for name, weight in weights.items():
        role = theirs.roles[name]
        if weight.ndim > 1 or role == "norm" or role.startswith("lambda"):
            inputs = 0 if name in theirs.transposed else -1  # the dimension that holds them
            if not slopes or not slopes[name].any(inputs).all():
                found.append(name)
    return found


def transposed(theirs, x, given):
    """Names of the matrices whose rows are inputs, as in x @ W.

    Where x is 0 but for its first channel, a matrix behind x has a gradient in its first column
    alone, or, if it is transposed, in its first row. So it is with W_O and the output's channel.
    """
    weights, _ = theirs.draw()
    first = torch.zeros(x.shape[2])
    first[0] = 1
    of_input = gradients(theirs, weights, first * x, given, slope=x)
    of_output = gradients(theirs, weights, x, given, slope=first * x)
    found = set()
    for name, role in theirs.roles.items():
        if theirs.weights[name].ndim == 2 and re.fullmatch("[qkv]+|gate|o", role) and of_input:
            gradient = of_output[name].T if role == "o" else of_input[name]
            if not gradient[1:].any() and gradient[:, 1:].any():
                found.add(name)
    return frozenset(found)
