"""What a user may have said wrongly of a layer: its n_head, its version, or what it is at all."""
from dataclasses import replace

import torch

from port import given, outside
from port.search import Search

A_LITTLE = 2  # seconds of one core for each other reading


def is_a_block(port, way, x):
    """A sentence, if the layer gives something even where all its matrices are 0. Else ""."""
    port.draw()
    without_matrices = {}
    for name, weight in port.drawn.items():
        without_matrices[name] = torch.zeros_like(weight) if weight.ndim > 1 else weight
    port.use(without_matrices)
    y = port.run(way.arguments, x)
    if y is None or not y.isfinite().all() or y.abs().max() < 1e-6:
        return ""
    lambdas = [name for name, role in port.roles.items() if role.startswith("lambda_")]
    place = lambdas[0].rpartition(".")[0] if lambdas else ""
    advice = f", perhaps layer = yours.{place}" if place else ""
    return ("with all its matrices 0 the layer still gives something, so it adds a residual. Is it "
            f"a whole block? Give the attention alone{advice}.")


def other_reading(port):
    """(Reading, why) for which sizes of weights speak, against what was said. Else (None, "")."""
    said = port.said
    parts = port.draw(given.orders(port.fused, said.heads)[0])
    rows = sum(len(part) for part in parts["q"])
    names = {role: name for name, role in port.roles.items()}
    if "lambda_q1" in names:
        d = port.weights[names["lambda_q1"]].shape[-1]
        maps, remainder = divmod(rows, d)
        reading = replace(said, version=1, n_head=maps)
        why = f"{names['lambda_q1']} has {d} channels, and the queries have {rows}"
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
    if not port.said.causal and not outside.sees_the_last_token(port, seen):
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
