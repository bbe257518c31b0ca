"""How a layer is read: its number of maps, its version, and the calls that it runs with."""
import inspect
import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass

import torch

from port.roles import NoVerdict
from port.theirs import X


@dataclass(frozen=True)
class Reading:
    n_head: int  # maps, two for each head. In version 2 heads
    version: int
    depth: int | None  # counted from 0. None: that of its lambda_init
    causal: bool

    @property
    def h(self):
        """The number of heads."""
        return self.n_head * self.version // 2


def read(theirs, n_head, version, depth):
    """(x, readings, calls): an input of the right size, how the layer may be read, the likeliest
    first, and [(number, what forward is given besides x), ...] of the calls that run.

    n_head, version: what the user said, or None.
    """
    missing = [role for role in "qkv" if role not in rows_of(theirs, 1)]
    if missing:
        raise NoVerdict(f"no weight is {', '.join(missing)}: say names = {{role: name}}. They were "
                        f"read as {theirs.roles}")
    is_shown = False
    widths = Counter(n for weight in theirs.weights.values() for n in weight.shape[-2:])
    texts = [12, *reversed(lengths(theirs, 1, 1))]
    for T, (C, _) in itertools.product(texts, widths.most_common()):
        readings = [Reading(*sizes, depth, theirs.causal)
                    for sizes in sizes_of(theirs, C, n_head, version)]
        if readings:
            is_shown = True
            x = text(T, C)
            calls = calls_that_run(theirs, x, readings[0].h)
            if calls:
                return x, readings, calls
    if not is_shown:
        raise NoVerdict("no weight of lambda's shows how many maps there are: say n_head, two for a head")
    raise NoVerdict(f"the layer does not run: {theirs.why_it_does_not_run()}")


def text(T, C):
    return torch.randn(2, T, C, generator=torch.Generator().manual_seed(0))


def rows_of(theirs, C):
    """{role: rows of all its matrices together}, if x has C channels."""
    rows = Counter()
    for name, weight in theirs.weights.items():
        role = theirs.roles[name]
        letters = theirs.orders(1)[0] if role == theirs.fused and role else [role]
        for letter in letters:
            rows[letter] += weight.numel() // len(letters) // C
    return rows


def sizes_of(theirs, C, n_head, version):
    """[(n_head, version), ...]: what was said, and what weights show, if x has C channels."""
    shown, rows = [], rows_of(theirs, C)
    vectors = [weight for name, weight in theirs.weights.items()
               if theirs.roles[name] in ("lambda_q1", "lambdas")]
    if vectors:
        width = vectors[0].shape[-1]  # d, or in some ports 2d
        maps, rest = divmod(rows["q"], width)
        if width > 1 and rest == 0:
            shown = [(n, 1) for n in (maps, 2 * maps) if n % 2 == 0 and n <= rows["q"]]
    elif "gate" in rows:
        shown = [(rows["gate"], 2)]
    if shown and version not in (None, shown[0][1]):
        raise NoVerdict(f"is version = {shown[0][1]} meant? So its weights say")
    if n_head is None:
        return shown
    said = (n_head, version or (shown[0][1] if shown else 1))
    return [said] + [sizes for sizes in shown if sizes != said]


def lengths(theirs, h, C):
    """Numbers of tokens to look at, the longest first: some, odd so that a last piece is not full,
    and even, those that the layer names, and one more than these."""
    named = [n for m in theirs.layer.modules() for n in vars(m).values() if type(n) is int]
    named += [n for table in theirs.layer.buffers() for n in table.shape]
    some = {311, 256, 127, 64, 37, 32, 19, *named, *(n + 1 for n in named)}
    most = min(1025, math.isqrt(2**23 // h), 2**28 // C**2)  # more would take long
    return sorted((n for n in some if 12 < n <= most), reverse=True)


# ---- what forward is given besides x

def calls_that_run(theirs, x, h):
    """[(number, what forward is given besides x), ...]: of those with equal outputs the last, since
    a layer may keep an old mask."""
    weights, _ = theirs.draw()
    found = {}
    for number, given in enumerate(calls_of(theirs, *x.shape[1:], h)):
        y = theirs.run(weights, x, given)
        if y is not None:
            size = y.nan_to_num().abs().max().clamp(min=1e-30)
            key = str((y / size).nan_to_num(9).mul(1e3).round().int().tolist())
            found[key] = number, given
    return list(found.values())


def wanted(forward):
    """The arguments of forward, behind x, that get something: those it needs, and masks."""
    return [a.name for a in list(inspect.signature(forward).parameters.values())[1:]
            if a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD
            or re.search("mask|causal", a.name)]


def calls_of(theirs, T, C, h):
    """[{argument of forward: what it is given}, ...]: all masks and tables, if it wants some."""
    positions, found = torch.arange(T)[None], []
    for mask, (cos, sin, table) in itertools.product(masks(T, h), tables(T, C, h)):
        offers = {  # by words in the argument's name, the first that fits
            "mask": mask,
            "causal": theirs.causal,
            "cos": cos,
            "sin": sin,
            "cache|past": None,
            "start|infer|layer|depth|idx": 0,
            "lam|λ": 0.4,
            "^(k|v|kv|keys?|values?|context)$": X,
            "pos.*ids": positions,
            "": table,  # all others
        }
        given = {name: next(offers[words] for words in offers if re.search(words, name))
                 for name in wanted(theirs.layer.forward)}
        if not any(all(given[n] is old[n] for n in given) for old in found):
            found.append(given)
    return found


def masks(T, h):
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    some = [torch.zeros(T, T).masked_fill(later, -math.inf), ~later, later]
    return [None, True, *some, *(mask.expand(2, h, T, T) for mask in some), torch.ones(2, T)]


def tables(T, C, h):
    """(cos, sin, both in one): a rotary table in one of its usual shapes, or none."""
    found = [(None, None, None), (None, None, X)]
    for d in (C // h, C // h // 2):
        angle = torch.arange(T)[:, None] * 1e4 ** (-torch.arange(0, d, 2) / d)  # (T, d/2)
        twice = torch.cat((angle, angle), dim=-1)
        for a in (angle, twice, twice[None], angle[None, None], twice[None, None]):
            found.append((a.cos(), a.sin(), (a.cos(), a.sin())))
        found.append((None, None, torch.polar(torch.ones_like(angle), angle)))
    return found
