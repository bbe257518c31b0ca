"""
What a layer is given besides x: masks, rotary tables, a depth, and so on.

Where `forward` wants more than x, an argument gets what stands behind the first pattern that is
found in its name. All masks and tables are tried, and the best verdict counts. If your layer wants
something else, that is one more line in `offers`.
"""
import inspect
import itertools
import math
import re

import torch

X = object()  # stands for the input itself


def wanted(forward):
    """The names of the arguments of forward, behind x, that get something."""
    names = []
    for argument in list(inspect.signature(forward).parameters.values())[1:]:
        is_needed = argument.default is argument.empty
        is_needed = is_needed and argument.kind is argument.POSITIONAL_OR_KEYWORD
        if is_needed or re.search("mask|causal", argument.name):
            names.append(argument.name)
    return names


def boolean_arguments(forward):
    """{name: default} of those that are True or False."""
    arguments = inspect.signature(forward).parameters.values()
    return {a.name: a.default for a in arguments if type(a.default) is bool}


def offers(T, C, h, depth, lambda_init):
    """What is offered to forward, by the words in an argument's name: a dict for each try."""
    positions = torch.arange(T)[None]
    for mask, (cos, sin, table) in itertools.product(masks(T, h), tables(T, C, h)):
        yield {
            "mask": mask,
            "causal": True,
            "cos": cos,
            "sin": sin,
            "cache|past": None,
            "start|infer": 0,
            "layer|depth|idx": depth,
            "lam|λ": lambda_init,
            "^(k|v|kv|keys?|values?|context)$": X,
            "pos.*ids": positions,
            "": table,  # all others
        }


def masks(T, h):
    is_later = torch.ones(T, T, dtype=torch.bool).triu(1)
    some = [torch.zeros(T, T).masked_fill(is_later, -math.inf), ~is_later, is_later]
    for_each_head = [mask.expand(2, h, T, T) for mask in some]
    return [None, True, *some, *for_each_head, torch.ones(2, T)]


def tables(T, C, h):
    """(cos, sin, both in one), each a rotary table in one of its usual shapes, or none at all."""
    found = [(None, None, None), (None, None, X)]
    for d in (C // h, C // h // 2):
        angle = torch.arange(T)[:, None] * 1e4 ** (-torch.arange(0, d, 2) / d)  # (T, d/2)
        twice = torch.cat((angle, angle), dim=-1)
        for a in (angle, twice, twice[None], angle[None, None], twice[None, None]):
            found.append((a.cos(), a.sin(), (a.cos(), a.sin())))
        complex_numbers = torch.polar(torch.ones_like(angle), angle)
        matrices = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), dim=-1)
        found += [(None, None, complex_numbers), (None, None, matrices.unflatten(-1, (2, 2)))]
    return found


def choose(offer, names):
    """{argument: what it gets} of one offer."""
    given = {}
    for name in names:
        given[name] = next(offer[words] for words in offer if re.search(words, name))
    return given


def in_words(value):
    """What an argument got, for the user."""
    if value is X:
        return "x"
    if isinstance(value, tuple):
        return "a rotary table"
    if not isinstance(value, torch.Tensor):
        return str(value)
    if value.dtype == torch.bool:
        where = "above" if value[..., 0, -1].all() else "on and below"
        return f"boolean, True {where} the diagonal"
    if value.dtype == torch.int64:
        return "positions"
    if value.isinf().any():
        return "float, -inf above the diagonal"
    return "ones" if value.ndim == 2 and (value == 1).all() else "a rotary table"


def orders(fused, h):
    """Orders of the rows of a weight that holds several, as letters: for all heads at once, or head
    after head. In a second version there are two queries for each key. No such weight has [""]."""
    if not fused:
        return [""]
    known = {
        "qkv": ["qkv", "qqkv", "qqqqkv", "qkqkvv", "qqkkv"],
        "qk": ["qk", "qkqk"],
        "kv": ["kv", "kkv"],
    }
    some = known.get(fused, [fused])
    return some + [order * h for order in some]
