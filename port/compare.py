"""Our layer beside the port: the same weights and input, and how far the outputs are apart."""
import copy
import math
from types import SimpleNamespace

import torch

from port import paper
from port.theirs import LAMBDAS

EXACT = 5e-6  # a fit that is nearer than this gets no better in float32


def ours(parts, reading):
    """w of port/paper.py: weights, sizes and numbers of our layer, made of parts of theirs."""
    w = SimpleNamespace(h=reading.heads, lambda_init=reading.lambda_init, factor=1.0)
    w.is_theta_fitted = False
    w.q, w.k, w.v = [torch.cat(parts[letter]) for letter in "qkv"]
    for role in LAMBDAS:
        setattr(w, role, (parts[role] or [torch.zeros(1)])[0])
    paper.set_sizes(w, reading.version)
    w.gate = torch.cat(parts["gate"] or [w.q])
    w.o = torch.cat(parts["o"], 1) if parts["o"] else torch.eye(w.h * w.d_v).double()
    norms = [part.flatten() for part in parts["norm"]]
    gains = [part for part in norms if len(part) in (w.d_v, w.h * w.d_v)]
    if len(gains) != w.h:  # no norm for each head, but one, perhaps in two factors, or none
        gains = [math.prod(gains) if gains else torch.arange(w.d_v) + 1.0]  # 1 would not show
    w.norm = torch.cat(gains).reshape(-1, 1, w.d_v).expand(w.h, 1, w.d_v)
    w.output_norm = math.prod(part for part in norms if len(part) == len(w.o))  # 1 if there is none
    w.output_norm = torch.ones(len(w.o)).double() * w.output_norm
    return w


class Draw:
    """One draw of the port's weights, with the port's output for it, and our layer's."""

    def __init__(self, port, reading, seen, way, order, seed, flat):
        parts = port.draw(order, seed, flat, without=seen.unused_norms)
        self.x = seen.x.double()
        self.y = port.run(way.arguments, seen.x).detach().double()
        self.size = self.y.abs().max().clamp(min=1e-30)
        self.kept = {}  # what our layer gave up to some step, by the steps that made it
        try:
            self.w = ours(parts, reading)
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError):
            self.w = None  # the weights do not have the sizes of such a layer

    def has_the_sizes_of(self, steps):
        if self.w is None:
            return False
        try:
            self.difference(steps, self.w)
        except RuntimeError:
            return False
        return True

    def error(self, steps):
        """The largest difference, relative to the largest output, with the paper's numbers."""
        key = (steps.split, steps.values, steps.group_keys, steps.group_values, steps.maps,
               steps.lam, steps.subtract)
        try:
            if key not in self.kept:
                self.kept[key] = self.heads(steps, self.w)
            return self.largest(self.difference(steps, self.w, self.kept[key]))
        except RuntimeError:  # the sizes do not fit such a mistake
            return math.inf

    def fit(self, steps, turned=None, theta=None):
        """(error, w) with the lambda_init and the scale that fit best.

        With turned and theta, that many channels turn, and theta is fitted, too, from there on.
        """
        w = copy.copy(self.w)
        numbers = [w.lambda_init, math.log(w.scale)]
        if theta is not None:
            w.turned = turned
            w.is_theta_fitted = True
            numbers.append(math.log(theta))
        numbers = torch.tensor(numbers).double()
        try:
            now = self.difference_at(numbers, steps, w)
            stalls = 0
            for _ in range(6 if theta is None else 12):  # of Gauss-Newton
                if self.largest(now) < EXACT or stalls == 2:
                    break
                slopes = []
                for small in torch.eye(len(numbers)).double() * 1e-6:
                    slopes.append((self.difference_at(numbers + small, steps, w) - now) * 1e6)
                slopes = torch.stack(slopes, 1).nan_to_num()
                inverse = torch.linalg.pinv(slopes.T @ slopes, rtol=1e-12)
                numbers = numbers - (inverse @ slopes.T @ now).clamp(-1, 1)
                before = now
                now = self.difference_at(numbers, steps, w)
                if now.norm() > 0.9 * before.norm():  # it hardly comes nearer
                    stalls += 1
            return self.largest(now), w
        except RuntimeError:
            return math.inf, w

    def difference_at(self, numbers, steps, w):
        w.lambda_init = numbers[0]
        w.scale = numbers[1].exp()
        if w.is_theta_fitted:
            w.theta = numbers[2].exp()
        return self.difference(steps, w)

    def difference(self, steps, w, heads=None):
        """Of the port from our layer, with the factor that fits best: (B * T * C)."""
        w.factor = 1.0
        y = steps.output(self.heads(steps, w) if heads is None else heads, w, steps)
        w.factor = (y * self.y).sum() / y.square().sum()
        return (self.y - w.factor * y).flatten().nan_to_num(math.inf)

    def heads(self, steps, w):
        return paper.attend(*self.projected(steps, w), steps.lam(self.x, w), w, steps)

    def projected(self, steps, w):
        """q, k and v. They are kept, unless theta is being fitted."""
        if w.is_theta_fitted:
            return paper.project(self.x, w, steps)
        key = (steps.split, steps.values, steps.group_keys, steps.group_values, steps.turn)
        if key not in self.kept:
            self.kept[key] = paper.project(self.x, w, steps)
        return self.kept[key]

    def largest(self, difference):
        return (difference.abs().max() / self.size).item()
