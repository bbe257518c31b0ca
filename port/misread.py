"""What a user may have said wrongly of a layer: its n_head, its version, or what it is at all."""
import re
from dataclasses import replace

import torch

from port import given, outside
from port.roles import VECTORS, in_short
from port.search import Search
from port.theirs import Filled

A_LITTLE = 2  # seconds of one core for each other reading
CHECK = "Are n_head, version and names right?"


def is_a_block(port, way, x):
    """A sentence, if the layer gives something even where all its matrices are 0. Else ""."""
    without_matrices = {}
    for name, weight in port.draw().weights.items():
        without_matrices[name] = torch.zeros_like(weight) if weight.ndim > 1 else weight
    y = Filled(port, without_matrices).run(way.arguments, x)
    if y is None or not y.isfinite().all() or y.abs().max() < 1e-6:
        return ""
    lambdas = [name for name, role in port.roles.items() if role.startswith("lambda")]
    place = lambdas[0].rpartition(".")[0] if lambdas else ""
    advice = f", perhaps layer = yours.{place}" if place else ""
    return ("with all its matrices 0 the layer still gives something, so it adds a residual. Is it "
            f"a whole block? Give the attention alone{advice}.")


def ask_for_names(port, unknown):
    """A sentence on weights whose names and shapes do not tell what they are."""
    weights = ", ".join(f"{name} {tuple(port.weights[name].shape)}" for name in unknown)
    missing = ", ".join(port.missing_roles())
    ending = f" Not found were: {missing}." if missing else ""
    if any(port.weights[name].ndim == 2 for name in unknown):
        ending += " If the layer is a whole block, give its attention alone."
    return (f"what is {weights}? Say it with names = {{role: name of the weight}}, roles being q, "
            f"k, v, several such as qkv, o, norm, lambda_q1 ...{ending}")


def what_does_not_fit(port, C):
    """A sentence that names the weights whose shapes are not those of such a layer."""
    said = port.said
    missing = [role for role in port.missing_roles() if role in ("q", "k", "v")]
    if missing:
        all_sizes = sizes_in_words(port, port.weights)
        return f"{all_sizes}. Not found were: {', '.join(missing)}. {CHECK}"
    parts = port.draw(given.orders(port.fused, said.heads)[0]).parts
    for role, expected in misfits(parts, said, C):
        names = [name for name, its in port.roles.items()
                 if role in (its, *port.vectors_in.get(name, []))
                 or re.fullmatch("[qkv]+", its) and role in its]
        return f"{sizes_in_words(port, names)}, and {expected} is expected. {CHECK}"
    return (f"its weights do not have the sizes of such a layer: "
            f"{sizes_in_words(port, port.weights)}. {CHECK}")


def sizes_in_words(port, names):
    words = {}  # of weights in a list of heads, one
    for name in names:
        shape = tuple(port.weights[name].shape)
        words[in_short([name])[0], shape] = f"{name} {shape} was read as {port.roles[name]}"
    return ", ".join(words.values())


def misfits(parts, said, C):
    """(role, the shape that is expected) of what can't be, the cause first.

    parts: {role: [part, ...]}, see Filled.
    """
    h = said.heads
    key_maps = 2 if said.version == 1 else 1
    rows = {role: sum(len(part) for part in some) for role, some in parts.items()}
    for role in ("q", "k", "v"):
        if {part.shape[-1] for part in parts[role]} != {C}:
            yield role, f"(outputs, {C})"
    d = rows["q"] // (2 * h)
    if d == 0 or rows["q"] % (2 * h) != 0:
        yield "q", f"({2 * h} d, {C})"
        return  # the others follow from d
    for role in VECTORS:
        if any(part.shape[-1] != d for part in parts[role]):
            yield role, f"({d},)"
    kv = rows["k"] // (key_maps * d)
    if rows["k"] % (key_maps * d) != 0 or h % max(1, kv) != 0:
        yield "k", f"({key_maps * d} for each of {h} heads or of some that share, {C})"
    d_v = rows["v"] // max(1, kv)
    width = sum(part.shape[-1] for part in parts["o"])
    if parts["o"] and width != h * d_v:
        yield "o", f"({C}, {h * d_v})"


def other_reading(port):
    """(Reading, why) for which sizes of weights speak, against what was said. Else (None, "")."""
    said = port.said
    parts = port.draw(given.orders(port.fused, said.heads)[0]).parts
    rows = sum(len(part) for part in parts["q"])
    names = {role: name for name, role in port.roles.items()}
    vector = names.get("lambda_q1") or names.get("lambdas")
    if vector:
        d = port.weights[vector].shape[-1]
        maps, remainder = divmod(rows, d)
        reading = replace(said, version=1, n_head=maps)
        why = f"{vector} has {d} channels, and the queries have {rows}"
        fits = remainder == 0 and maps % 2 == 0
    elif "gate" in names:
        h = sum(len(part) for part in parts["gate"])
        reading = replace(said, version=2, n_head=h)
        why = f"{names['gate']} has {h} rows, and there are no lambda vectors"
        fits = rows % (2 * h) == 0
    else:
        return None, ""
    return (reading, why) if fits and reading != said else (None, "")


def better_reading(port, seen, clock):
    """A sentence, if the layer speaks for another n_head, version or causal, and fits that."""
    reading, why = other_reading(port)
    if reading and Search(port, reading, seen, clock, A_LITTLE).run():
        return f"is version = {reading.version}, n_head = {reading.n_head} meant? {why}."
    if not port.said.causal and not outside.sees_the_last_token(seen):
        causal = replace(port.said, causal=True)
        if Search(port, causal, seen, clock, A_LITTLE).run():
            return "is causal = True meant? No token sees a later one."
    return ""


def better_reading_by_trying(port, seen, clock):
    """The same, where no weight tells: with twice and half as many maps."""
    said = port.said
    for n_head in (2 * said.n_head, said.n_head // 2):
        if n_head > 0 and n_head * said.version % 2 == 0:
            reading = replace(said, n_head=n_head)
            if Search(port, reading, seen, clock, A_LITTLE, most=2).run():
                return f"is n_head = {n_head} meant? With this it is explained."
    return ""


def as_plain_softmax(port, seen, clock):
    """What explains the layer, if it is read as softmax attention, or None."""
    said = port.said
    for n_head in (said.n_head, said.n_head // 2, 2 * said.n_head):
        softmax = replace(said, version=0, n_head=n_head)
        if n_head > 0:
            found = Search(port, softmax, seen, clock, A_LITTLE, most=1).run()
            if found:
                return found
    return None
