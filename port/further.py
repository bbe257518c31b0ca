"""Our layer equals the port for a few tokens. Does it with another lambda, and in a longer text?"""
from port import paper
from port.compare import ours
from port.findings import Finding, nearness
from port.mistakes import find
from port.outside import LONGER, apart

FITTED = ("lambda_init", "scale", "factor", "theta", "turned")  # numbers that the search has found
ABOVE_1 = {"lambda_q1": 1.0, "lambda_k1": 1.2, "lambda_q2": 0.2, "lambda_k2": 0.1}
BELOW_0 = {"lambda_q1": 0.2, "lambda_k1": 0.1, "lambda_q2": 1.0, "lambda_k2": 1.2}


def look(port, found, seen):
    """Findings, where they part after all."""
    causes = []
    if found.has_the_papers_lambda(nearness(seen.tolerance)):
        causes += with_another_lambda(port, found, seen)
    if seen.mistakes.keys().isdisjoint({"sees the future", "length"}):
        causes += in_a_longer_text(port, found, seen)
    return causes


def with_another_lambda(port, found, seen):
    """Whether lambda goes above 1 and below 0, as the paper's may."""
    limit = max(0.05, 10 * seen.tolerance)
    for lambdas in (ABOVE_1, BELOW_0):
        y, expected, w = outputs(port, found, seen, seen.x, found.draw.way.arguments, lambdas)
        if y is None or apart(y, expected).max() < limit:
            continue
        if apart(-y, expected).max() < limit:
            return [Finding(find("rows sum to 1"))]
        lam = float((w.exp_part + w.lambda_init).mean())
        detail = f"The paper's is {lam:.2f} for weights with which yours is another number."
        return [Finding(find("lambda bounded"), detail)]
    return []


def in_a_longer_text(port, found, seen):
    """Whether the layer does the same in the longest text that it can read."""
    C = seen.x.shape[2]
    for T in LONGER:
        arguments = port.offers(T, C)[found.draw.way.number]
        y, expected, _ = outputs(port, found, seen, port.input(T, C), arguments)
        if y is None:
            continue
        errors = apart(y, expected)  # (B, T)
        limit = max(0.01, 5 * seen.tolerance)
        if errors.max() < limit:
            return []
        first = (errors.amax(0) > limit).nonzero()[0].item()
        detail = f"In a text of {T} tokens they part from token {first} on, by {errors.max():.0%}."
        return [Finding(find("longer text"), detail)]
    return []


def outputs(port, found, seen, x, arguments, lambdas=None):
    """(the port's output, or None where it gives none; our layer's; its w)."""
    filled = port.draw(found.draw.order, without=seen.unused_norms, lambdas=lambdas)
    w = ours(filled.parts, found.reading)
    for number in FITTED:
        setattr(w, number, getattr(found.w, number))
    y = filled.run(arguments, x)
    if y is None or not y.isfinite().all():
        return None, None, w
    return y.double(), paper.layer(x.double(), w, found.steps), w
