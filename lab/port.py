"""
What is wrong with my port of differential attention (arXiv 2410.05258)? This says it, on a CPU.

    python -m lab.port myport.py

where myport.py makes the layer in its smallest form, (B, T, C) to (B, T, C), and says its sizes:

    from attention import MultiheadDiffAttn                      # your code
    layer = MultiheadDiffAttn(embed_dim=64, depth=3, num_heads=4)
    n_head = 8                                                   # maps: two for each head
    depth = 3                                                    # counted from 0
    names = {"q": "W_q.weight", "kv": "memory.weight"}           # only if the guess is wrong

Or behind the file: python -m lab.port attention.py "layer = ..." n_head=8 depth=3. version = 2 is
DIFF V2, causal = False an encoder. layer may be a function layer(x, w) of weights with Microsoft's
names, w["q_proj.weight"]. In Python: print(diagnose(layer, n_head=8, depth=3, version=1)).

It says BROKEN (sees the future, gives NaN, ...), DIFFERS (computes something else), CHOICE (the
paper's layer but for what one may choose) or SAME (in any order of its weights; biases are 0, and
the norm's eps and a lambda per head do no harm). The exit code is 0 for SAME and CHOICE only.
"""
import copy
import functools
import inspect
import itertools
import math
import re
import sys
import time
from collections import defaultdict

import torch

from lab.stranger import TOLERANCE, PortError, Stranger, load, sizes, turn

SECONDS = 18  # of one core, until the search gives up


def straight(x, w, p):
    """The paper's layer, Eq. 1 to 3. x (B, T, C), h heads of two maps, kv = h / r of keys."""
    q = split(x @ w.q.T, p.h, 2)  # (B, h, 2, T, d)
    k = split(x @ w.k.T, p.kv, 2)  # (B, kv, 2, T, d)
    v = split(x @ w.v.T, p.kv, 1)  # (B, kv, 1, T, 2d)
    k, v = k.repeat_interleave(p.r, 1), v.repeat_interleave(p.r, 1)
    s = rotary(q) @ rotary(k).mT / p.scale  # scale = sqrt(d)
    A = (s + torch.full_like(s, -math.inf).triu(1)).softmax(-1)  # (B, h, 2, T, T)
    lam = w.exp_part + p.init  # Eq. 2: exp(q1 . k1) - exp(q2 . k2) + lambda_init
    y = (A @ v)[:, :, 0] - lam * (A @ v)[:, :, 1]  # Eq. 1, (B, h, T, 2d)
    y = norm(y, -1) * w.norm  # over the channels of one token and one head
    y = y.transpose(1, 2).flatten(2) @ w.o.T  # (B, T, C)
    return y * p.factor  # Eq. 3: 1 - lambda_init


def split(y, n, maps):
    return y.unflatten(-1, (n, maps, -1)).permute(0, 2, 3, 1, 4)


def norm(y, dim):
    return y * torch.rsqrt(y.square().mean(dim, keepdim=True) + 1e-5)


def rotary(q):
    d = q.shape[-1]
    angle = torch.arange(q.shape[-2])[:, None] * 1e4 ** (-torch.arange(0, d, 2).double() / d)
    return turn(q, angle.cos(), angle.sin(), True)


V2 = {"p.kv, 2)": "p.kv, 1)",  # one key for both maps, lambda by token and head, no norm
      "w.exp_part + p.init": "torch.sigmoid(x @ w.gate.T).mT[..., None]",
      "norm(y, -1) * w.norm": "y"}


# ---- the list: name, kind, {the paper's code: the port's}, sentence. What has no code is seen from
# ---- outside, or measured. A new mistake is one more entry


MAPS = "(s + torch.full_like(s, -math.inf).triu(1)).softmax(-1)"
SCORES = "s = rotary(q) @ rotary(k)"
OUTPUT = "norm(y, -1) * w.norm"
HEADS = "y.transpose(1, 2).flatten(2)"
LEAK = "Tokens see the future: validation loss too good, generation bad."
NORM = "The norm is over the channels of one token and one head, whatever it is called."
MISTAKES = [
    ("sees the future", "BROKEN", {}, LEAK + " Norms and reshapes leak too, in spite of a mask."),
    ("NaN", "BROKEN", {}, "Outputs are NaN. Usual: -inf is put in after the softmax."),
    ("random", "BROKEN", {}, "In eval mode one input gives two outputs. Usual: F.dropout(x)."),
    ("mixes samples", "BROKEN", {}, "Samples are mixed. Usual: (T, B, C) read as (B, T, C)."),
    ("no past", "BROKEN", {}, "No token uses another. Usual: q @ k.mT before transpose(1, 2)."),
    ("dead weights", "BROKEN", {}, "Some weights have no effect, and so they never learn."),
    ("switch", "BROKEN", {}, "Two settings of one layer give different outputs."),
    ("length", "BROKEN", {}, "Tokens give another output in a longer text: generation is bad."),
    ("no mask", "DIFFERS", {MAPS: "s.softmax(-1)"}, "Scores of later tokens are -inf. " + LEAK),
    ("mask inverted", "DIFFERS", {MAPS: MAPS.replace("triu(1)", "tril()") + ".nan_to_num()"},
     "The mask hides the future, and not the past. " + LEAK),
    ("mask after softmax", "DIFFERS", {MAPS: "s.softmax(-1).tril()"},
     "The mask comes before the softmax, or the divisor of each row sees the future."),
    ("mask multiplied", "DIFFERS", {MAPS: "s.tril().softmax(-1)"},
     "A masked score is -inf, and not 0, since exp(0) = 1. " + LEAK),
    ("softmax twice", "DIFFERS", {"(A @ v)[:, :, 0] - lam * (A @ v)[:, :, 1]":
     "(A[:, :, 0] - lam * A[:, :, 1]).softmax(-1) @ v[:, :, 0]"},
     "The difference is the map. Another softmax leaves no negative weight, and leaks."),
    ("one map", "DIFFERS", {}, "The second map has no effect: lambda A2 is gone."),
    ("scale", "DIFFERS", {}, "Scores are divided by sqrt(d), d the channels of one map's query."),
    ("qk-norm", "DIFFERS", {SCORES: "s = rotary(norm(q, -1)) @ rotary(norm(k, -1))"},
     "The paper does not normalise q and k, which caps the scores."),
    ("rotary over both maps", "DIFFERS", {SCORES: "q, k = [rotary(m.transpose"
     "(2, 3).flatten(3)).unflatten(-1, (2, -1)).transpose(2, 3) for m in (q, k)]; s = q @ k"},
     "Each map's q and k turn by themselves: split, then rotate."),
    ("heads not transposed", "DIFFERS", {"y.unflatten(-1, (n, maps, -1)).permute(0, 2, 3, 1, 4)":
     "y.reshape(len(y), n, y.shape[1], maps, -1).transpose(2, 3)"},
     "Heads are view(B, T, h, c).transpose(1, 2): view(B, h, T, c) mixes tokens. " + LEAK),
    ("merge not transposed", "DIFFERS", {HEADS: "y.reshape(len(y), y.shape[2], -1)"},
     "transpose(1, 2) comes before the reshape, or tokens mix. " + LEAK),
    ("repeated before split", "DIFFERS", {"k, v = k.repeat_interleave(p.r, 1),": "k, v = "
     "k.flatten(1, 2).repeat_interleave(p.r, 1).unflatten(1, (-1, 2)),"}, "Grouped keys are split "
     "into maps, then repeated. Microsoft's naive file repeats first; its flash file is right."),
    ("V2 pairs by chunks", "DIFFERS", {"k.repeat_interleave(p.r, 1), v.repeat_interleave(p.r, 1)":
     "[m.repeat_interleave(2 * p.r, 1).unflatten(1, (2, -1)).transpose(1, 2)[:, :, :, 0]"
     " for m in (k, v)]"}, "Queries 2n and 2n+1 are a pair: they meet the same key and value."),
    ("lambda", "DIFFERS", {}, "lambda is exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + "
     "lambda_init, in V2 sigmoid(x W). Another form learns at another rate."),
    ("lambda", "DIFFERS", {"torch.sigmoid(x @ w.gate.T)": "(x @ w.gate.T)"}, ""),
    ("lambda_init", "DIFFERS", {}, "lambda_init is 0.8 - 0.6 exp(-0.3 l), l counted from 0, so 0.2 "
     "in the first layer. Another one subtracts too much or too little at the start."),
    ("factor", "DIFFERS", {}, "y * (1 - lambda_init) makes gradients as large as a Transformer's."),
    ("no norm", "DIFFERS", {OUTPUT: "y"}, "Each head's output has an RMSNorm(2 d)."),
    ("mean subtracted", "DIFFERS", {"return y * torch.rsqrt(": "y = y - y.mean(dim, keepdim=True); "
     "return y * torch.rsqrt("}, "An RMSNorm does not subtract the mean. LayerNorm, GroupNorm do."),
    ("norm over all heads", "DIFFERS", {OUTPUT: OUTPUT.replace("-1", "(1, 3)")}, NORM),
    ("norm after out_proj", "DIFFERS", {OUTPUT: "y", "@ w.o.T":
     "@ w.o.T; y = norm(y, -1) * w.norm.flatten()"}, NORM + " So it comes before out_proj."),
    ("norm over time", "DIFFERS", {OUTPUT: OUTPUT.replace("-1", "(2, 3)")},
     NORM + " GroupNorm on (B, C, T) is over time. " + LEAK),
    ("norm over time", "DIFFERS", {OUTPUT: OUTPUT.replace("-1", "2")}, ""),
    ("no rotary", "CHOICE", {SCORES: "s = q @ k"}, "Positions elsewhere?"),
    ("no norm weight", "CHOICE", {" * w.norm": ""}, "The norm has no weight."),
    ("narrow values", "CHOICE", {}, "d_v = d: values are half as wide as the paper's."),
    ("maps in blocks", "SAME", {"(n, maps, -1)).permute(0, 2, 3,":
     "(maps, n, -1)).permute(0, 3, 2,"}, ""),
    ("rotary by halves", "SAME", {"angle.sin(), True": "angle.sin(), False"}, ""),
    ("rotary backwards", "SAME", {"angle.sin(), True": "-angle.sin(), True"}, ""),
    ("rotary backwards", "SAME", {"angle.sin(), True": "-angle.sin(), False"}, ""),
    ("heads alternate", "SAME", {HEADS: "y.permute(0, 2, 3, 1).flatten(2)"}, ""),
    ("norm weight 1 + w", "SAME", {" * w.norm": " * (1 + w.norm)"}, ""),
]
# what only sharp maps show: flat ones, of W_q = 0, are compared first
SHARP = (SCORES, "angle.sin(), True", "(n, maps, -1)).permute(0, 2, 3,")


def variants(code, sharp, grouped):
    """(names of mistakes, code with them), those of sharp maps or the others, likely ones first."""
    groups = defaultdict(lambda: [None])
    for mistake in MISTAKES:
        right = next(iter(mistake[2]), "no code")
        possible = grouped or "repeated" not in mistake[0]
        if possible and right in code and (right in SHARP) == sharp:
            groups[right].append(mistake)
    cost = {"DIFFERS": 100, "CHOICE": 10, "SAME": 1}
    chosen = [[m for m in some if m] for some in itertools.product(*groups.values())]
    for some in sorted(chosen, key=lambda some: sum(cost[m[1]] for m in some)):
        changed = code
        for _, _, changes, _ in some:
            for right, wrong in changes.items():
                changed = changed.replace(right, wrong) if right in changed else ""
        if changed:
            yield [m[0] for m in some], changed


@functools.lru_cache(10_000)
def compiled(code):
    space = dict(globals())
    exec(code, space)
    return space["straight"]


def fit(layer, x, w, p, y, steps=12):
    """(error, p): p with the lambda_init, scale and factor that fit y best, by Gauss-Newton.

    Near lambda = 1 the maps cancel, and no step leads across. So there are two starts.
    """
    p = copy.copy(p)

    def rest(init, scale):
        p.init = init
        p.scale = scale
        p.factor = 1.0
        try:
            ours = layer(x, w, p)
            p.factor = ((ours * y).sum() / (ours * ours).sum()).item()
            return (y - p.factor * ours).nan_to_num(1e9).flatten()
        except (RuntimeError, IndexError):  # this code does not fit these sizes
            return y.flatten()
    starts = [(p.init, p.scale), (1.5 - w.exp_part.mean().item(), p.scale)]
    for init, scale in starts if steps == 12 else starts[:1]:
        best = rest(init, scale)
        begin = best.norm()
        for step in range(steps):
            if best.norm() < 1e-7 * y.norm() or step == 3 and best.norm() > begin / 2:
                break
            slopes = [best - rest(init + 1e-5, scale), best - rest(init, scale + 1e-5)]
            slopes = torch.stack(slopes, 1) / 1e-5
            change = torch.linalg.lstsq(slopes, best, driver="gelsd").solution
            init += change[0].clamp(-0.5, 0.5).item()
            scale *= 1 + (change[1] / scale).clamp(-0.4, 0.7).item()
            best = rest(init, scale)
        error = (best.abs().max() / y.abs().max()).item()
        if error < TOLERANCE:
            break
    return error, p


def explain(port, version, call, x, order, until):
    """({mistake: detail} that make our layer the port, "", error), or (None, where, error)."""
    draws = []
    for seed, flat in ((1, True), (1, False), (2, False)):
        w, p = sizes(port.draw(order, seed, flat), port, version)
        with torch.no_grad():
            draws.append((x.double(), w, p, call(x).double()))
    code = "".join(inspect.getsource(part) for part in (straight, split, norm, rotary))
    for right, wrong in V2.items() if version == 2 else ():
        code = code.replace(right, wrong)
    where = "already where W_q = 0 makes all maps flat: mask, values, norm, factor or out_proj"
    nearest = math.inf
    tried = []
    for some, flat in variants(code, False, p.r > 1):
        if time.process_time() > until:
            break
        steps = 6 if "softmax twice" in some and "no mask" not in some else 0
        error, _ = fit(compiled(flat), *draws[0], steps)
        # what flat maps may not tell apart
        maps = re.findall(r".*(?:softmax|repeat).*|norm\(y, .*\)", flat)
        if error > TOLERANCE or maps in tried:
            nearest = nearest if tried else min(nearest, error)
            continue
        if not tried:
            where = "where q and k are split, turned, compared or subtracted: not with W_q = 0"
            nearest = math.inf
        tried.append(maps)
        for more, sharp in variants(flat, True, False):
            error, p = fit(compiled(sharp), *draws[1])
            nearest = min(nearest, error)
            if error < TOLERANCE:
                x, other_w, _, other_y = draws[2]
                error, again = fit(compiled(sharp), x, other_w, p, other_y)
                same = abs(p.scale / again.scale - 1) + abs(p.factor / again.factor - 1)
                if error < TOLERANCE and same < 1e-3:
                    return measured(port, version, some + more, draws[1][1], p, again), "", error
            if time.process_time() > until:
                break
    return None, where, nearest


def measured(port, version, names, w, p, again):
    """{mistake: detail}: names, and what the numbers of two fits, p and again, say."""
    found = dict.fromkeys(names, "")
    right = port.lambda_init
    factor = 1 - right if version == 1 else 1.0
    if abs(p.scale / math.sqrt(p.d) - 1) > 1e-3:
        found["scale"] = f"sqrt(d) is {math.sqrt(p.d):.3f}, yours is {p.scale:.3f}."
    if version == 1:
        if (w.exp_part + p.init).abs().max() < 1e-4:
            found["one map"] = ""
        elif abs(p.init - again.init) > 1e-3 or not w.exp_part.any():
            ours = w.exp_part.mean() + right
            found["lambda"] = f"Eq. 2 gives {ours:.3f}, yours is {ours + p.init - right:.3f}."
        elif abs(p.init - right) > 1e-3:
            factor = 1 - p.init
            found["lambda_init"] = f"The paper's is {right:.3f}, yours is {p.init:.3f}."
        if not p.has_gain and "no norm" not in found:
            found["no norm weight"] = ""
        if p.d_v == p.d:
            found["narrow values"] = ""
    if abs(p.factor - factor) > 1e-3:
        found["factor"] = f"The paper's is {factor:.3f}, yours is {p.factor:.3f}."
    return found


class Verdict:
    """kind, sees_future, explained, and short names: broken, differs, choices, same."""

    def __init__(self, found, explained, sees_future, notes):
        kinds = {name: kind for name, kind, _, _ in MISTAKES}
        self.found = found
        self.explained = explained
        self.sees_future = sees_future
        self.notes = notes
        self.broken = [name for name in found if kinds[name] == "BROKEN"]
        self.differs = [name for name in found if kinds[name] == "DIFFERS"]
        self.choices = [name for name in found if kinds[name] == "CHOICE"]
        self.same = [name for name in found if kinds[name] == "SAME"]
        rest = "CHOICE" if self.choices else "SAME"
        rest = "DIFFERS" if self.differs or not explained else rest
        self.kind = "BROKEN" if self.broken else rest

    def __str__(self):
        lines = [self.kind]
        for name in self.broken + self.differs + self.choices + self.same:
            _, kind, code, text = next(m for m in MISTAKES if m[0] == name)
            lines.append(f"{kind:8} {name}: {text} {self.found[name]}".rstrip(" :"))
            lines += [f"         paper: {right}   yours: {wrong}" for right, wrong in code.items()]
        return "\n".join(lines + self.notes)


def diagnose(layer, n_head=8, depth=0, version=1, causal=True, names=None):
    """The Verdict on a layer. The arguments are those of the file's first lines."""
    port = Stranger(layer, n_head, version, names)
    port.depth = depth
    port.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
    try:
        return examine(port, version, causal)
    finally:
        port.restore()


def examine(port, version, causal):
    port.draw("", 1)
    x, calls, found = port.looks(causal)
    sees_future = "sees the future" in found
    found = {n: found[n] for n in found if causal or n not in ("sees the future", "length")}
    if {"NaN", "random", "mixes samples"} & set(found):
        return Verdict(found, False, sees_future, [])
    found |= port.switch(calls[0], x)
    dead = port.dead(calls[0], x)
    causes, where, error = None, "", math.inf
    ways = list(itertools.product(calls[:6], port.orders))
    until = time.process_time() + SECONDS / min(2, len(ways))
    for call, order in ways:
        if causes is not None:
            break
        try:
            result = explain(port, version, call, x, order, until)
        except (PortError, RuntimeError, IndexError, ZeroDivisionError) as problem:
            where = where or f"in the sizes of their weights: {problem}"
            continue
        until += SECONDS / 6 if len(ways) > 1 else 0
        if result[0] is not None or result[2] < error:
            causes, where, error = result
    if causes is None and error == math.inf and not found:
        raise PortError(f"level 0 found nothing, and level 1 can't compare: {where}")
    notes = ["weights: " + ", ".join(f"{name} is {role}" for name, role in port.roles.items())]
    if causes is None:
        notes.append(f"Nothing on the list explains it. They part {where}. {error:.2g} of the "
                     "largest output remains.")
    else:
        found |= {name: causes[name] for name in causes if causal or name != "no mask"}
        notes.append(f"With these changes our layer equals yours to {error:.0e}.")
    verdict = Verdict(found, causes is not None, sees_future, notes)
    if dead and verdict.kind in ("BROKEN", "DIFFERS"):  # in a right layer they do no harm
        found["dead weights"] = ", ".join(dead)
    return Verdict(found, causes is not None, sees_future, notes)


def main(path, *lines):
    names = load(path, lines)
    if "layer" not in names:
        raise PortError(f"{path} has no layer: add layer = YourAttention(...)")
    said = {name: names[name] for name in inspect.signature(diagnose).parameters if name in names}
    verdict = diagnose(**said)
    print(verdict)
    return verdict.kind in ("BROKEN", "DIFFERS")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(len(sys.argv) < 2)
    try:
        sys.exit(main(*sys.argv[1:]))
    except PortError as problem:
        sys.exit(str(problem))
