"""
What is wrong with my port of differential attention (arXiv 2410.05258)? This says it, on a CPU.

    python -m lab.port myport.py

where myport.py makes the layer in its smallest form, (B, T, C) to (B, T, C), and says its sizes:

    from attention import MultiheadDiffAttn                      # your code
    layer = MultiheadDiffAttn(embed_dim=64, depth=3, num_heads=4)
    n_head = 8                         # maps: two for each head. In version 2 it counts heads
    depth = 3                                                    # counted from 0
    names = {"q": "W_q.weight", "kv": "memory.weight"}           # only if the guess is wrong:
                                    # q, k, v, qkv or in your order, o, norm, lambda_q1, lambda

Or behind the file: python -m lab.port attention.py "layer = ..." n_head=8 depth=3. version = 2 is
DIFF V2, causal = False an encoder. layer may be a function layer(x, w) of weights with Microsoft's
names, w["q_proj.weight"]. In Python: print(diagnose(layer, n_head=8, depth=3, version=1)).

It says BROKEN (sees the future, gives NaN, ...), DIFFERS (computes something else), CHOICE (the
paper's layer but for what one may choose) or SAME (its weights may have other usual orders; biases
are 0, and the norm's eps and a lambda per head do no harm). The mistakes are those of
lab/results/mistakes.md. The exit code is 0 for SAME and CHOICE only.
"""
import inspect
import itertools
import math
import runpy
import sys
import time
import traceback
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F

from lab.stranger import LAMBDAS, TOLERANCE, Stranger

SECONDS = 18  # of one core, until the search gives up
NOT_COMPARED = "It is not compared: that needs sound outputs, and weights of such sizes."


def straight(x, w, p):
    """The paper's layer, Eq. 1 to 3. x (B, T, C), h heads of two maps, kv = h / r of keys."""
    q = split(x @ w.q.T, p.h, 2)  # (B, h, 2, T, d)
    k = split(x @ w.k.T, p.kv, 2)  # (B, kv, 2, T, d)
    v = split(x @ w.v.T, p.kv, 1)  # (B, kv, 1, T, 2d)
    k, v = k.repeat_interleave(p.r, 1), v.repeat_interleave(p.r, 1)
    q, k = [rotary(m) for m in (q, k)]
    s = q @ k.mT / p.scale  # scale = sqrt(d)
    A = (s + torch.full_like(s, -math.inf).triu(1)).softmax(-1)  # (B, h, 2, T, T)
    lam = w.exp_part + p.init  # Eq. 2: exp(q1 . k1) - exp(q2 . k2) + lambda_init
    y = (A @ v)[:, :, 0] - lam * (A @ v)[:, :, 1]  # Eq. 1, (B, h, T, 2d)
    y = merge(norm(y, -1) * w.norm) @ w.o.T  # the norm is over one token and one head. (B, T, C)
    return y * p.factor  # Eq. 3: 1 - lambda_init


V2 = {"p.kv, 2)": "p.kv, 1)",  # one key for both maps, lambda by token and head, no norm
      "w.exp_part + p.init": "torch.sigmoid(x @ w.gate.T).mT[..., None]",
      "norm(y, -1) * w.norm": "y"}
GROUPED = "k.repeat_interleave(p.r, 1), v.repeat_interleave(p.r, 1)"
ENCODER = {"(s + torch.full_like(s, -math.inf).triu(1))": "s"}  # it has no mask


def split(y, n, maps):
    return y.unflatten(-1, (n, maps, -1)).permute(0, 2, 3, 1, 4)


def merge(y):
    return y.transpose(1, 2).flatten(2)


def norm(y, dim):
    return y * torch.rsqrt(y.square().mean(dim, keepdim=True) + 1e-5)


def rotary(m, base=1e4):
    d = m.shape[-1]
    angle = torch.arange(m.shape[-2])[:, None] * base ** (-torch.arange(0, d, 2).double() / d)
    a, b = m[..., 0::2], m[..., 1::2]
    a, b = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack((a, b), -1).flatten(-2)


def read_mistakes():
    """[(name, kind, the paper's code, the port's, sentence), ...] of the page: one list for all."""
    page = Path(__file__).parent / "results" / "mistakes.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| ")]
    return [[cell[1:-1].strip("`") for cell in row] for row in rows[1:]]


MISTAKES = read_mistakes()
KIND = {name: kind for name, kind, *_ in MISTAKES}
COST = {"BROKEN": 0, "DIFFERS": 100, "CHOICE": 10, "SAME": 1}  # the cheapest are tried first
SLOW = "softmax twice"  # lambda shows in flat maps and must be fitted there: it is tried later
# where a change does nothing as long as the maps are flat, because W_q = 0
SHARP = ("rotary(m)", "for m in (q, k)", "(n, maps, -1)).permute(0, 2, 3,",
         "k, v = k.repeat_interleave(p.r, 1),")


def variants(code, sharp, until):
    """(names, code) of the layer with mistakes: those that only sharp maps show, or the others."""
    places = defaultdict(lambda: [("", 0, "", "")])
    for name, kind, right, wrong, _ in MISTAKES:
        if right and right in code and (right in SHARP) == sharp:
            places[right].append((name, COST[kind] + 100 * (name == SLOW), right, wrong))
    done = set()
    for some in sorted(itertools.product(*places.values()),
                       key=lambda some: sum(cost for _, cost, _, _ in some)):
        changed = code
        for _, _, right, wrong in some:
            changed = changed.replace(right, wrong)
        if changed not in done and time.process_time() < until:
            done.add(changed)
            yield [name for name, *_ in some if name], changed


def fit(code, x, w, p, y, steps):
    """(error, p): p with the lambda_init, scale and factor that fit y best, by Gauss-Newton."""
    p = SimpleNamespace(**vars(p))
    space = dict(globals())
    exec(code, space)

    def rest(numbers):
        p.init = numbers[0]
        p.scale = numbers[1].exp()
        p.factor = 1.0
        ours = space["straight"](x, w, p)
        p.factor = (ours * y).sum() / ours.square().sum()
        return (y - p.factor * ours).flatten().nan_to_num(math.inf)

    numbers = torch.tensor([p.init, math.log(p.scale)]).double()
    with suppress(RuntimeError, IndexError):  # raised where this code does not fit these sizes
        for _ in range(steps):
            slopes = torch.func.jacfwd(rest)(numbers).nan_to_num()
            change = torch.linalg.lstsq(slopes, rest(numbers)[:, None], driver="gelsd").solution
            numbers -= change[:, 0].clamp(-0.5, 0.5)
        return (rest(numbers).abs().max() / y.abs().max().clamp(min=1e-30)).item(), p
    return math.inf, p


def sizes(parts, port, version):
    """(w, p): the weights of our layer, made of parts of theirs, and its sizes and numbers."""
    w = SimpleNamespace(exp_part=torch.zeros(1))
    for letter in "qkv":
        vars(w)[letter] = torch.cat(parts[letter])
    p = SimpleNamespace(h=port.heads, init=port.lambda_init, factor=1.0)
    p.d = len(w.q) // p.h // 2
    p.kv = max(1, len(w.k) * version // p.d // 2)
    p.r = p.h // p.kv
    p.scale = math.sqrt(p.d)
    p.d_v = len(w.v) // p.kv
    if all(parts[role] for role in LAMBDAS):
        q1, k1, q2, k2 = [parts[role][0] for role in LAMBDAS]
        w.exp_part = ((q1 * k1).sum(-1).exp() - (q2 * k2).sum(-1).exp()).reshape(-1, 1, 1)
    w.gate = torch.cat([part for part in parts["lambda"] if part.ndim == 2] or [w.q])
    gains = [part.flatten() for part in parts["norm"] if part.numel() in (p.d_v, p.h * p.d_v)]
    if len(gains) != p.h:  # no norm for each head, but one, perhaps in two factors, or none
        gains = [math.prod(gains, start=torch.ones(()))] if gains else [torch.arange(p.d_v) + 1.0]
    w.norm = torch.cat(gains).reshape(-1, 1, p.d_v).expand(p.h, 1, p.d_v)
    w.o = torch.cat(parts["o"], 1) if parts["o"] else torch.eye(p.h * p.d_v).double()
    return w, p


def explain(port, version, causal, ways, x):
    """({mistake: detail} that make our layer the port, or None, and a sentence)."""
    tries = []  # for each order of fused rows and each way to call it: three draws of its weights
    for order, given in itertools.product(port.orders, ways):
        draws = []
        # raised where the weights do not have the sizes of such a layer
        with suppress(RuntimeError, ValueError, IndexError, ZeroDivisionError):
            for seed, flat in ((1, True), (1, False), (2, False)):
                w, p = sizes(port.draw(order, seed, flat), port, version)
                draws.append((x.double(), w, p, port.run(given, x).detach().double()))
            tries.append(draws)
    code = "".join(map(inspect.getsource, (straight, split, merge, norm)))
    changes = (V2 if version == 2 else {}) | ({} if causal else ENCODER)
    if version == 1 and all(p.r == 1 for draws in tries for _, _, p, _ in draws):
        changes[GROUPED] = "k, v"  # nothing is repeated
    for right, wrong in changes.items():
        code = code.replace(right, wrong)
    flats = [math.inf]  # the errors
    sharps = [math.inf]
    until = time.process_time() + SECONDS
    for some, flat in variants(code, False, until):
        likely = tries if len(some) < 3 else tries[:len(ways)]  # many mistakes: in the first order
        for draws in likely:
            flats.append(fit(flat, *draws[0], steps=6 if SLOW in some else 0)[0])
            for more, sharp in variants(flat, True, until) if flats[-1] < TOLERANCE else ():
                error, p = fit(sharp, *draws[1], steps=8)
                if error < TOLERANCE:  # once more, with other weights
                    error, again = fit(sharp, *draws[2], steps=8)
                sharps.append(error)
                if error < TOLERANCE:
                    found = measured(some + more, port, version, draws[1][1], p, again)
                    return found, f"With these changes our layer equals yours to {error:.0e}."
        if min(flats) == math.inf:  # the paper's layer, which comes first, has other sizes
            return None, NOT_COMPARED
    where = f"where q and k are split, turned, compared or subtracted, by {min(sharps):.2g}"
    if min(flats) > TOLERANCE:
        where = f"already where W_q = 0 makes all maps flat, by {min(flats):.2g}"
    return None, ("Nothing on the list explains it. Does n_head count the maps? They part "
                  f"{where} of the largest output.")


def measured(names, port, version, w, p, again):
    """{mistake: detail}: names, and what the numbers of two fits, p and again, say."""
    found = dict.fromkeys(names, "")
    numbers = {"scale": (math.sqrt(p.d), p.scale), "factor": (1.0, p.factor)}
    if version == 1:
        numbers["factor"] = (1 - port.lambda_init, p.factor)
        numbers["value width"] = (2 * p.d, p.d_v)
        if abs(p.init - again.init) < 1e-3 and w.exp_part.any():
            numbers["lambda_init"] = (port.lambda_init, p.init)
            numbers["factor"] = (1 - p.init, p.factor)
        else:  # not the paper's form
            lam = (w.exp_part + p.init).mean()
            found["lambda" if abs(lam) > 1e-4 else "one map"] = f"It is {lam:.3f} here."
    for name, (paper, yours) in numbers.items():
        if abs(yours - paper) > 1e-3:
            found[name] = f"The paper's is {paper:.4g}, yours is {yours:.4g}."
    return found


class Verdict:
    """kind, sees_future, explained, and lists of names: broken, differs, choices, same."""

    def __init__(self, found, explained, sees_future, notes):
        self.broken, self.differs, self.choices, self.same = [
            [name for name in found if KIND[name] == kind] for kind in COST]
        self.explained = explained
        self.sees_future = sees_future
        kinds = [KIND[name] for name in found] + ["SAME" if explained else "DIFFERS"]
        self.kind = min(kinds, key=list(COST).index)
        self.lines = [self.kind]
        for name in self.broken + self.differs + self.choices + self.same:
            _, kind, right, wrong, text = next(m for m in MISTAKES if m[0] == name)
            self.lines.append(f"{kind:8} {name}: {text} {found[name]}".rstrip(" :"))
            if right and not found[name]:  # what is measured has numbers
                self.lines.append(f"         paper: {right}   yours: {wrong}")
        self.lines += notes

    def __str__(self):
        return "\n".join(self.lines)


def diagnose(layer, n_head=8, depth=0, version=1, causal=True, names=None):
    """The Verdict on a layer. The arguments are those of the file's first lines."""
    port = Stranger(layer, n_head, depth, version, names or {})
    training = port.layer.training
    port.layer.eval()
    port.draw()
    x, ways = port.ways()
    seen = [port.look(given, x) for given in ways]
    # some ways give a mask, and some none: a layer is causal if it is so in one of them
    leaks = ["NaN" in some or causal and "sees the future" in some for some in seen]
    ways = [given for given, leak in zip(ways, leaks) if leak == min(leaks)]
    found = seen[leaks.index(min(leaks))]
    sees_future = "sees the future" in found
    dead = port.dead(ways[0], x)
    for name in () if causal else ("sees the future", "length"):
        found.pop(name, None)
    roles = ", ".join(f"{name} is {role}" for name, role in port.roles.items())
    causes = None
    note = NOT_COMPARED
    if not {"NaN", "random", "mixes samples"} & set(found):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # for tensors as small as these, more are slower
        causes, note = explain(port, version, causal, ways, x)
        torch.set_num_threads(threads)
    if note is NOT_COMPARED and not found:
        raise ValueError(f"these weights can't be compared: are n_head and names right? {roles}")
    found |= causes or {}
    explained = causes is not None
    wrong = Verdict(found, explained, sees_future, []).kind in ("BROKEN", "DIFFERS")
    if dead and (wrong or any("lambda" in port.roles[name] for name in dead)):
        found["dead weights"] = ", ".join(dead)  # others, in a right layer, do no harm
    port.layer.train(training)
    settings = f"n_head = {n_head}, depth = {depth}, version = {version}, causal = {causal}"
    return Verdict(found, explained, sees_future, [f"read with {settings}: {roles}", note])


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # from (B, T, H, d)
    y = F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return y.transpose(1, 2)


def apply_rotary_emb(q, cos, sin, *_, **__):
    return rotary(q.transpose(1, 2)).transpose(1, 2).to(q)


def main(path, *lines):
    stand_in = MagicMock(flash_attn_func=flash_attn_func, apply_rotary_emb=apply_rotary_emb)
    stand_in.__spec__ = torch.__spec__  # transformers asks for one
    sys.modules.update(flash_attn=stand_in, triton=None)  # both need a GPU
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self  # a CPU will do
    sys.modules.pop("model", None)  # the port may have a model.py of its own
    sys.path.insert(0, str(Path(path).resolve().parent))
    names = None
    while names is None:
        try:
            names = runpy.run_path(path)
        except ImportError as problem:
            *_, (frame, _) = traceback.walk_tb(problem.__traceback__)
            importer = frame.f_globals["__name__"]
            is_kernel = str(problem.name).startswith("triton") and importer != "<run_path>"
            name = importer if is_kernel else problem.name
            if name is None or sys.modules.get(name) is stand_in:
                raise
            print(f"{name} can't be imported here, a stand-in is in its place")
            sys.modules[name] = stand_in
    sys.modules["triton"] = None  # again: torch must not find the stand-in
    for line in lines:
        exec(line, names)
    if "layer" not in names:
        raise ValueError(f"{path} has no layer: add layer = YourAttention(...)")
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
    except Exception as problem:
        sys.exit(f"{type(problem).__name__}: {problem}")
