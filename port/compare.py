"""Our layer beside the port: the same weights and input, and how far the outputs are apart."""
import copy
import math

import torch

from port import paper

EXACT = 5e-6  # a fit that is nearer than this gets no better in float32


def ours(parts, reading):
    """w of port/paper.py, made of the parts of their weights. See Filled."""
    w = paper.Weights(
        version=reading.version,
        h=reading.heads,
        q=torch.cat(parts["q"]),
        k=torch.cat(parts["k"]),
        v=torch.cat(parts["v"]),
        lambda_init=reading.lambda_init,
    )
    for role in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
        if parts[role]:
            setattr(w, role, parts[role][0])
    if reading.version == 2:
        w.gate = torch.cat(parts["gate"])
    w.o = torch.cat(parts["o"], 1) if parts["o"] else torch.eye(w.h * w.d_v).double()
    norms = [part.flatten() for part in parts["norm"]]
    w.norm = norm_of_heads(norms, w)
    w.output_norm = norm_of_outputs(norms, w)
    return w


def norm_of_heads(norms, w):
    """(h, 1, d_v): a weight for each head, or one for all, which may be in several factors."""
    fitting = [norm for norm in norms if len(norm) in (w.d_v, w.h * w.d_v)]
    if not fitting:
        weight = torch.arange(w.d_v) + 1.0  # the port has none. A weight of ones would not show
    elif len(fitting) == w.h:
        weight = torch.cat(fitting)
    else:
        weight = math.prod(fitting)
    return weight.reshape(-1, 1, w.d_v).expand(w.h, 1, w.d_v)


def norm_of_outputs(norms, w):
    """(C): the weight of a norm behind o, or ones."""
    weight = torch.ones(len(w.o)).double()
    for norm in norms:
        if len(norm) == len(w.o):
            weight = weight * norm
    return weight


class Draw:
    """One draw of the port's weights, with the port's output for it, and our layer's."""

    def __init__(self, port, reading, seen, way, order, seed, flat):
        filled = port.draw(order, seed, flat, without=seen.unused_norms)
        self.way = way
        self.order = order
        self.is_flat = flat
        self.x = seen.x.double()
        self.y = filled.run(way.arguments, seen.x).detach().double()
        self.size = self.y.abs().max().clamp(min=1e-30)
        self.projections = {}  # q, k and v, by the steps that make them
        self.flat_heads = {}  # the heads' outputs, by the steps that make them where maps are flat
        try:
            self.w = ours(filled.parts, reading)
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError):
            self.w = None  # the weights do not have the sizes of such a layer

    def has_the_sizes_of(self, steps):
        if self.w is None:
            return False
        try:
            self.difference(self.heads(steps), self.w, steps)
        except RuntimeError:
            return False
        return True

    def error(self, steps):
        """The largest difference, relative to the largest output, where all maps are flat.

        lambda_init is the paper's. Where W_q = 0 neither the scale nor the steps turn and scores
        play a part, so what the heads give is kept without regard to them.
        """
        assert self.is_flat
        key = (steps.split, steps.values, steps.group_keys, steps.group_values, steps.maps,
               steps.lam, steps.subtract)
        try:
            if key not in self.flat_heads:
                self.flat_heads[key] = self.heads(steps)
            difference, _ = self.difference(self.flat_heads[key], self.w, steps)
            return self.largest(difference)
        except RuntimeError:  # the sizes do not fit such a mistake
            return math.inf

    def fit(self, steps, turned=None, theta=None):
        """(error, w) with the lambda_init, scale and factor that fit best, by Gauss-Newton.

        With turned and theta, that many channels turn, and theta is fitted, too, from there on.
        """
        w = copy.copy(self.w)
        numbers = [w.lambda_init, math.log(w.scale)]
        if theta is not None:
            w.turned = turned
            numbers.append(math.log(theta))
        numbers = torch.tensor(numbers).double()
        try:
            now, w.factor = self.difference_at(numbers, w, steps)
            stalls = 0
            for _ in range(6 if theta is None else 12):
                if self.largest(now) < EXACT or stalls == 2:
                    break
                numbers = numbers + self.step(numbers, now, w, steps)
                before = now
                now, w.factor = self.difference_at(numbers, w, steps)
                if now.norm() > 0.9 * before.norm():  # it hardly comes nearer
                    stalls += 1
            return self.largest(now), w
        except RuntimeError:
            return math.inf, w

    def step(self, numbers, now, w, steps):
        """A step of Gauss-Newton: what to add to the numbers, so that the difference vanishes."""
        slopes = []
        for small in torch.eye(len(numbers)).double() * 1e-6:
            ahead, _ = self.difference_at(numbers + small, w, steps)
            slopes.append((ahead - now) * 1e6)
        slopes = torch.stack(slopes, 1).nan_to_num()
        inverse = torch.linalg.pinv(slopes.T @ slopes, rtol=1e-12)
        return -(inverse @ slopes.T @ now).clamp(-1, 1)

    def difference_at(self, numbers, w, steps):
        """The difference with these lambda_init, log(scale) and perhaps log(theta) put into w."""
        w.lambda_init = numbers[0]
        w.scale = numbers[1].exp()
        if len(numbers) == 2:
            q, k, v = self.project(steps)
        else:
            w.theta = numbers[2].exp()
            q, k, v = paper.project(self.x, w, steps)
        heads = paper.attend(q, k, v, steps.lam(self.x, w), w, steps)
        return self.difference(heads, w, steps)

    def difference(self, heads, w, steps):
        """(port minus our layer, as (B * T * C); the factor of ours by which it is smallest)."""
        y = steps.output(heads, w, steps)
        factor = (y * self.y).sum() / y.square().sum()
        return (self.y - factor * y).flatten().nan_to_num(math.inf), factor

    def heads(self, steps):
        """What the heads of our layer give, (B, h, T, d_v), with the numbers of the paper."""
        q, k, v = self.project(steps)
        return paper.attend(q, k, v, steps.lam(self.x, self.w), self.w, steps)

    def project(self, steps):
        """q, k and v with the paper's theta. They are kept."""
        key = (steps.split, steps.values, steps.group_keys, steps.group_values, steps.turn,
               steps.queries)
        if key not in self.projections:
            self.projections[key] = paper.project(self.x, self.w, steps)
        return self.projections[key]

    def largest(self, difference):
        return (difference.abs().max() / self.size).item()
