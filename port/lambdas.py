"""lambda of a port: which of its vectors are multiplied, and where they start."""
import copy

import torch

from port.paper import exp_dot
from port.problems import NoVerdict
from port.roles import VECTORS

STD = 0.1  # of the vectors at the start, in the paper's code

# four vectors as q1, k1, q2, k2. Within a pair, and so within each of these, the order does not
# matter: exp(a . b) - exp(c . d)
PAIRS = [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2), (2, 3, 0, 1), (1, 3, 0, 2), (1, 2, 0, 3)]


def name_vectors(port, found, near):
    """Name the vectors that one weight holds, so that lambda has the paper's form.

    found.w and found.again have the same lambda as before, and in the paper's form the same
    lambda_init. NoVerdict if no order of the vectors makes it so.
    """
    tries = [(in_order(found.w, pairs), in_order(found.again, pairs), pairs) for pairs in PAIRS]
    w, again, pairs = min(tries, key=lambda one: abs(one[0].lambda_init - one[1].lambda_init))
    names = ", ".join(port.vectors_in)
    if abs(w.lambda_init - again.lambda_init) > near:
        raise NoVerdict(
            f"{names} might hold lambda_q1, lambda_k1, lambda_q2 and lambda_k2, but in no order of "
            "them is lambda the paper's. Give them as four weights, or, if lambda is to have "
            f'another form, say names = {{"lambda": {list(port.vectors_in)}}}')
    new_name = {VECTORS[old]: new for old, new in zip(pairs, VECTORS)}
    for name, vectors in port.vectors_in.items():
        port.vectors_in[name] = [new_name[vector] for vector in vectors]
    found.w, found.again = w, again


def in_order(w, pairs):
    """w with its four vectors in another order, and the same lambda."""
    changed = copy.copy(w)
    vectors = [getattr(w, name) for name in VECTORS]
    for name, number in zip(VECTORS, pairs):
        setattr(changed, name, vectors[number])
    changed.lambda_init = float((w.lambda_init + w.exp_part - changed.exp_part).mean())
    return changed


def far_start(port):
    """A sentence, if the layer as it was given has vectors that are far from the paper's. Else "".

    Where all are 0, outside.starts_from_zeros says more.
    """
    if port.is_function:  # it has no weights of its own
        return ""
    vectors = {}
    for name, role in port.roles.items():
        if role in VECTORS or role == "lambdas":
            vectors[name] = port.weights[name].detach().float()
    if not vectors:
        return ""
    std = torch.cat([vector.flatten() for vector in vectors.values()]).square().mean().sqrt()
    if std == 0 or STD / 3 < std < 3 * STD:  # of 8 numbers or more, so it is not exact
        return ""
    text = f"Here their std is {std:.2g}"
    by_role = {port.roles[name]: vector for name, vector in vectors.items()}
    if set(VECTORS) <= set(by_role):
        q1, k1, q2, k2 = [by_role[name] for name in VECTORS]
        lam = (exp_dot(q1, k1) - exp_dot(q2, k2) + port.said.lambda_init).flatten()
        text += f", and lambda is {lam[lam.abs().argmax()]:.4g}"  # in the head where it is largest
    return text + "."
