"""What a user may have said wrongly of a layer: its n_head, its version, or what it is at all."""
import torch

from port import outside
from port.search import Search

A_LITTLE = 2  # seconds of one core for each other reading


def is_a_block(port, way, x):
    """A sentence, if the layer gives something even where all its matrices are 0. Else ""."""
    port.draw()
    with torch.no_grad():
        for weight in port.drawn.values():
            if weight.ndim > 1:
                weight.zero_()
    y = port.run(way, x)
    if y is None or not y.isfinite().all() or y.abs().max() < 1e-6:
        return ""
    lambdas = [name for name, role in port.roles.items() if role.startswith("lambda_")]
    place = lambdas[0].rpartition(".")[0] if lambdas else ""
    advice = f", perhaps layer = yours.{place}" if place else ""
    return ("with all its matrices 0 the layer still gives something, so it adds a residual. Is it "
            f"a whole block? Give the attention alone{advice}.")


def other_readings(port):
    """[(version, n_head, why), ...] that sizes of weights speak for, against what was said."""
    parts = port.draw(port.orders()[0])
    rows = sum(len(part) for part in parts["q"])
    names = {role: name for name, role in port.roles.items()}
    if "lambda_q1" in names:
        d = port.weights[names["lambda_q1"]].shape[-1]
        maps, remainder = divmod(rows, d)
        reading = (1, maps, f"{names['lambda_q1']} has {d} channels, and the queries have {rows}")
        fits = remainder == 0 and maps % 2 == 0
    elif "gate" in names:
        h = len(port.weights[names["gate"]])
        reading = (2, h, f"{names['gate']} has {h} rows, and there are no lambda vectors")
        fits = rows % (2 * h) == 0
    else:
        return []
    return [reading] if fits and reading[:2] != (port.version, port.n_head) else []


def better_reading(port, ways, x, clock):
    """A sentence, if the layer speaks for another n_head, version or causal, and fits that."""
    for version, n_head, why in other_readings(port):
        if Search(port.as_if(version, n_head), ways, x, clock, A_LITTLE).run():
            return f"is version = {version}, n_head = {n_head} meant? {why}."
    if not port.causal and not any(outside.sees_the_last_token(port, way, x) for way in ways):
        causal = port.as_if(port.version, port.n_head, causal=True)
        if Search(causal, ways, x, clock, A_LITTLE).run():
            return "is causal = True meant? No token sees a later one."
    return ""


def better_reading_by_trying(port, ways, x, clock):
    """The same, where no weight tells: with twice and half as many maps."""
    for n_head in (2 * port.n_head, port.n_head // 2):
        if n_head > 0 and n_head * port.version % 2 == 0:
            if Search(port.as_if(port.version, n_head), ways, x, clock, A_LITTLE, most=2).run():
                return f"is n_head = {n_head} meant? With this it is explained."
    return ""


def as_plain_softmax(port, ways, x, clock):
    """(the port read as softmax attention, what explains it), or (None, None)."""
    for n_head in (port.n_head, port.n_head // 2, 2 * port.n_head):
        softmax = port.as_if(0, n_head)
        found = Search(softmax, ways, x, clock, A_LITTLE, most=1).run() if n_head > 0 else None
        if found:
            return softmax, found
    return None, None
