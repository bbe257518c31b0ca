"""
Which mistakes make the paper's layer into theirs? Found by trying, the fewest first.

Where W_q is 0 all maps are flat, and what makes the scores plays no part. So first mistakes are
tried with which the two are equal while maps are flat, and then, with these, some that show only
where maps are sharp. Numbers are fitted: a factor, lambda, the scale, and if that is not enough the
theta of the rotary embedding and how many channels it turns.
"""
import contextlib
import copy
import itertools
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from port import outside, paper
from port.mistakes import BY_TRYING, CHOICE, DIFFERS, SAME, no_turn, values_apart
from port.reading import calls_of, text
from port.roles import VECTORS
from port.theirs import DRAWS

COST = {DIFFERS: 100, CHOICE: 10, SAME: 1}
FLAT = 1e-4  # there A_1 - lambda A_2 is small, so rounding and the eps of the norm show more
SECONDS = 20  # of a core, for a search
THETAS = (1e4, 100.0, 1e6)  # theta is fitted from each of these
SHARES = (1, 1 / 2, 1 / 4, 3 / 4)  # of the channels, that turn
# four vectors as q1, k1, q2, k2, in the ways in which they may be multiplied
PAIRS = [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2), (2, 3, 0, 1), (1, 3, 0, 2), (1, 2, 0, 3)]


def exp_part(number, pairs=(0, 1, 2, 3)):
    """lambda without lambda_init in a draw. pairs: which of the four vectors is q1, k1, q2, k2."""
    a, b, c, d = [DRAWS[number][i] for i in pairs]
    return math.exp(a * b) - math.exp(c * d)


def ours(parts, h, version):
    """w of paper.py, made of the parts of their weights. Raises an error if the sizes don't fit."""
    w = SimpleNamespace(h=h, key_maps=2 if version == 1 else 1, factor=1.0, theta=10000.0)
    w.q, w.k, w.v = (torch.cat(parts[letter]) for letter in "qkv")
    w.d = w.turned = len(w.q) // (2 * h)
    w.kv = max(1, len(w.k) // w.d // w.key_maps)
    w.d_v = len(w.v) // w.kv
    w.o = torch.cat(parts["o"], 1) if parts["o"] else torch.eye(h * w.d_v).double()
    if version == 1 and 2 * w.o.shape[1] == h * w.d_v:  # each map has values of its own
        w.d_v //= 2
    w.gate = torch.cat(parts["gate"]) if parts["gate"] else None
    w.scale = math.sqrt(w.d)
    norms = [part.flatten() for part in parts["norm"]]
    of_heads = [norm for norm in norms if len(norm) in (w.d_v, h * w.d_v)]
    weight = torch.arange(w.d_v) + 1.0  # if they have none. A weight of ones would not show
    if of_heads:
        weight = torch.cat(of_heads) if len(of_heads) == h else math.prod(of_heads)
    w.norm = weight.reshape(-1, 1, w.d_v).expand(h, 1, w.d_v)
    w.output_norm = math.prod([norm for norm in norms if len(norm) == len(w.o)],
                              start=torch.ones(len(w.o)).double())
    return w


class Draw:
    """One draw of their weights, with their output, and w of our layer."""

    def __init__(self, theirs, reading, x, given, order, number, flat=False):
        weights, parts = theirs.draw(number, order, flat)
        self.x = x.double()
        y = theirs.run(weights, x, given)
        if y is None:
            raise RuntimeError("it refuses these weights")
        self.y = y.detach().double()
        self.w = ours(parts, reading.h, reading.version)
        self.w.lam = exp_part(number) + paper.lambda_init_of(reading.depth or 0)
        self.maps = {}  # {mistakes: what paper.maps_of gives}

    def difference(self, w, s, maps=None):
        """(theirs minus ours, flat and relative; the factor of ours by which it is smallest)."""
        y = paper.after_maps(maps or paper.maps_of(self.x, w, s), self.x, w, s)
        factor = (y * self.y).sum() / y.square().sum()
        return ((self.y - factor * y) / self.y.abs().max()).flatten().nan_to_num(math.inf), factor

    def error_where_flat(self, mistakes, s):
        """Of the draw with W_q = 0. Maps are kept: many mistakes come after them."""
        key = tuple(m for m in mistakes if m.step in paper.BEFORE_MAPS)
        try:
            if key not in self.maps:
                self.maps[key] = paper.maps_of(self.x, self.w, s)
            if any(m.by_lambda for m in mistakes):
                return self.fit(s, maps=self.maps[key])[0]
            return self.difference(self.w, s, self.maps[key])[0].abs().max().item()
        except RuntimeError:  # sizes do not fit such a mistake
            return math.inf

    def fit(self, s, turned=None, theta=None, maps=None):
        """(error, w with the numbers that fit best), by Gauss-Newton. maps: those of paper.maps_of,
        if they are known, and only lambda is fitted."""
        w = copy.copy(self.w)
        numbers = [w.lam] if maps else [w.lam, math.log(w.scale)]
        if theta:
            w.turned = turned
            numbers.append(math.log(theta))

        def at(numbers):
            w.lam = numbers[0]
            if not maps:
                w.scale = numbers[1].exp()
            if theta:
                w.theta = numbers[2].exp()
            return self.difference(w, s, maps)

        numbers = torch.tensor(numbers).double()
        try:
            now, factor = at(numbers)
            stalls = 0
            for _ in range(12 if theta else 6):
                slopes = torch.stack([(at(numbers + step)[0] - now) * 1e6
                                      for step in torch.eye(len(numbers)).double() * 1e-6], 1)
                change = torch.linalg.pinv(slopes.nan_to_num(), rtol=1e-6) @ now
                numbers = numbers - change.clamp(-1, 1)
                before, (now, factor) = now, at(numbers)
                stalls += bool(now.norm() > 0.9 * before.norm())  # it hardly comes nearer
                if stalls == (1 if maps else 2) or now.abs().max() < 5e-6:
                    break
            w.factor = factor
            return now.abs().max().item(), w
        except RuntimeError:
            return math.inf, w


class Try:
    """One way to read and to call their layer, in three draws of its weights. order: of the rows of
    a fused weight. Raises an error if weights of these sizes can't be so read."""

    def __init__(self, theirs, x, reading, order, call, given):
        self.reading, self.order, self.call, self.given = reading, order, call, given
        self.flat = Draw(theirs, reading, x, given, order, 0, flat=True)
        self.first = Draw(theirs, reading, x, given, order, 0)
        self.second = Draw(theirs, reading, x, given, order, 1)
        w, others = self.flat.w, {}
        if len(w.v) > w.kv * w.d_v:  # the paper's step does not fit two values for each head
            others = dict(values=values_apart)
        self.flat.difference(w, paper.steps_of(reading.version, reading.causal, **others))


@dataclass(frozen=True)
class Found:
    """What explains their layer: mistakes, and w of two draws, with the numbers that fit."""

    mistakes: tuple
    steps: SimpleNamespace
    at: Try
    w: SimpleNamespace
    other: SimpleNamespace
    error: float


class Search:
    """What is tried, and how near it came."""

    def __init__(self, theirs, readings, seen):
        self.reading, self.tolerance, self.leaks = readings[0], seen.tolerance, seen.leaks
        self.steps = vars(paper.steps_of(self.reading.version, self.reading.causal))
        self.tries = []
        for reading, call in itertools.product(readings, seen.calls):
            for order in theirs.orders(reading.h):
                with contextlib.suppress(RuntimeError, ValueError, ZeroDivisionError):
                    self.tries.append(Try(theirs, seen.x, reading, order, *call))
        self.nearest_flat = math.inf
        self.ends = time.process_time() + SECONDS
        self.was_cut_off = False

    def run(self):
        """Found, or None."""
        sharp = self.combinations(sharp=True, most=1)
        waiting = []  # equal where maps are flat. One more mistake is tried before another theta
        for mistakes in self.combinations(sharp=False, most=5):
            while waiting and cost_of(mistakes) > cost_of(waiting[0][0]) + COST[DIFFERS]:
                found = self.with_another_theta(*waiting.pop(0))
                if found:
                    return found
            if self.is_late():
                break
            tries = [one for one in self.tries if self.is_equal_where_flat(one.flat, mistakes)]
            if tries:
                waiting.append((mistakes, tries))
                found = first(self.fit(mistakes + more, tries) for more in sharp)
                if found:
                    return found
        return first(self.with_another_theta(*one) for one in waiting)

    def with_another_theta(self, mistakes, tries):
        ways = itertools.product(self.combinations(sharp=True, most=0), SHARES, THETAS)
        d = tries[0].flat.w.d
        return first(self.fit(mistakes + more, tries, int(share * d), theta)
                     for more, share, theta in ways)

    def combinations(self, sharp, most):
        """Tuples of mistakes, at most one for each step, the cheapest first. most: how many of them
        may be called DIFFERS."""
        is_grouped = any(one.flat.w.kv < one.flat.w.h for one in self.tries)
        lists = defaultdict(lambda: [()])  # {step: nothing, or one of its mistakes}
        for mistake in BY_TRYING:
            if (
                mistake.sharp == sharp and mistake.version in (0, self.reading.version)
                and (self.leaks or not mistake.leaks or not self.reading.causal)
                and (self.reading.causal or mistake.step != "maps")
                and (is_grouped or not mistake.grouped)
            ):
                lists[mistake.step].append((mistake,))
        found = [sum(some, ()) for some in itertools.product(*lists.values())]
        found = [some for some in found if sum(m.kind == DIFFERS for m in some) <= most]
        return sorted(filter(is_sensible, found), key=cost_of)

    def is_late(self):
        self.was_cut_off = time.process_time() > self.ends
        return self.was_cut_off

    def changed(self, mistakes):
        """The paper's steps with mistakes, or None where two of them want one step."""
        changes = {m.step: m.yours for m in mistakes}
        if len(changes) < len(mistakes):
            return None
        return SimpleNamespace(**self.steps | changes)

    def is_equal_where_flat(self, draw, mistakes):
        error = draw.error_where_flat(mistakes, self.changed(mistakes))
        self.nearest_flat = min(error, self.nearest_flat)
        return error < max(FLAT, self.tolerance)

    def fit(self, mistakes, tries, turned=None, theta=None):
        """Found, if our layer with these mistakes equals theirs in two draws of the weights."""
        s = self.changed(mistakes)
        leaks = any(m.leaks for m in mistakes)
        if (s is None or self.is_late() or (self.reading.causal and self.leaks != leaks)
                or (theta and s.turn is no_turn)):
            return None
        for one in tries:
            error, w = one.first.fit(s, turned, theta)
            if error < self.tolerance and w.factor > 0:  # else "maps swapped" says it better
                error, other = one.second.fit(s, turned, theta)
                if error < self.tolerance:
                    return Found(mistakes, s, one, w, other, error)

    def why_not(self):
        where = "where q and k are split, turned, compared or subtracted"
        if self.nearest_flat > max(FLAT, self.tolerance):
            where = "already where W_q = 0 makes all maps flat"
        nothing = "No cause was found in time" if self.was_cut_off else "Nothing on the list fits"
        return f"{nothing}. They part {where}."


def first(found):
    """The first that is not None, or None."""
    return next(filter(None, found), None)


def cost_of(mistakes):
    return sum(COST[mistake.kind] for mistake in mistakes)


def is_sensible(mistakes):
    """Where there is no norm, it does not matter how it is done."""
    changes = {m.step: m.yours for m in mistakes}
    return changes.get("over") != () or not changes.keys() & {"rms", "gain"}


# ---- what was found

def form_of_lambda(theirs, found, near):
    """(lambda_init, which of the four vectors is q1, k1, q2, k2), if lambda has the paper's form:
    without what the vectors make it is the same in both draws. Else None."""
    roles = set(theirs.roles.values())
    if found.at.reading.version == 2 or not roles & {*VECTORS, "lambdas"}:
        return None
    for pairs in PAIRS if "lambdas" in roles else PAIRS[:1]:
        one = float(found.w.lam) - exp_part(0, pairs)
        other = float(found.other.lam) - exp_part(1, pairs)
        if abs(one - other) < near:
            return one, pairs
    return None


def beyond(theirs, found, seen, form):
    """[(name, detail)]: does what was found hold with other lambdas, and in other texts?"""
    causes = []
    for number in (2, 3) if form else ():
        init, pairs = form
        lam = exp_part(number, pairs) + init
        with contextlib.suppress(RuntimeError):  # it may refuse such a lambda
            errors, sign = errors_of(theirs, found, number, seen.x, found.at.given, lam)
            if errors.max() > max(0.05, 10 * seen.tolerance):
                name = "rows sum to 1" if sign < 0 else "lambda bounded"
                causes.append((name, f"Where the paper's is {lam:.2f}, yours is another."))
                break
    C = seen.x.shape[2]
    for T in seen.lengths if "sees the future" not in seen.mistakes else ():
        given = calls_of(theirs, T, C, seen.h)[found.at.call]
        errors, _ = errors_of(theirs, found, 0, text(T, C), given, found.w.lam)
        if errors.max() > max(0.01, 5 * seen.tolerance):
            first = errors.amax(0).gt(0.01).nonzero()[0].item()
            causes.append(("length", f"In a text of {T} tokens they part from {first} on."))
            break
    return causes


def errors_of(theirs, found, number, x, given, lam):
    """(errors of the tokens, (B, T), the sign of their output relative to ours)."""
    draw = Draw(theirs, found.at.reading, x, given, found.at.order, number)
    for name in ("scale", "factor", "theta", "turned"):
        setattr(draw.w, name, getattr(found.w, name))
    draw.w.lam = lam
    y = paper.layer(draw.x, draw.w, found.steps)
    return outside.apart(y, draw.y).nan_to_num(math.inf), (y * draw.y).sum().sign()
