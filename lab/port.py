"""
What is wrong with my port of differential attention (arXiv 2410.05258)? This says it, on a CPU.

    python -m lab.port myport.py

lab/results/mistakes.md says what myport.py holds (so does --help). The paper's layer as code, the
list of mistakes, and what a layer is given are read from there. In Python: print(diagnose(layer)).
"""
import inspect
import itertools
import math
import re
import runpy
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F

from model import ATTENTION, GPTConfig, rotate

PAGE = (Path(__file__).parent / "results" / "mistakes.md").read_text(encoding="utf-8")
PAPER, GIVEN = re.findall("```python(.*?)```", PAGE, re.DOTALL)  # the code on it
# [[name, verdict, the paper's code, the port's, sentence], ...], and the first one of each name
MISTAKES = [[cell[1:-1].strip("`") for cell in line.strip("|").split("|")]
            for line in PAGE.splitlines() if line.startswith("| ")]
MISTAKE = {row[0]: row for row in reversed(MISTAKES)}
SHARP = PAGE.split("maps are not flat")[1]  # the page after these words: its rows show only there
COST = {"BROKEN": 0, "DIFFERS": 100, "CHOICE": 10, "SAME": 1}  # the smallest sum comes first
TOLERANCE = 1e-5  # of the largest output. float32 makes 2e-6
NOT_COMPARED = "It is not compared: that needs sound outputs, and weights of the paper's sizes."
# what these weights are when drawn, the same in all heads, so that 0 < lambda < 1
LAMBDAS = {"lambda_q1": 0.3, "lambda_k1": 0.25, "lambda_q2": 0.2, "lambda_k2": 0.1, "lambda": 0.4}
exec(GIVEN)  # defines orders and offers


def role_of(name, weight):
    """q, k, v, several such as qkv, o, lambda, lambda_q1, ..., gate, norm, qk_norm or bias."""
    name = name.lower().replace("λ", "lam").replace("c_attn", "qkv").replace("in_proj", "qkv")
    words = [word.strip("w") for word in re.findall("[a-z]+", name)]
    if pair := re.search("(?<![a-z])l(am.*)?([qk])_?([12])", name):  # lambda_q1, lq1, lam.k2
        return f"lambda_{pair[2]}{pair[3]}"
    if "b" in words or "bias" in words:
        return "bias"
    if re.search("(?<![a-z])lam|lambda", name) or weight.numel() == 1:
        return "lambda" if weight.numel() == max(weight.shape, default=1) else "gate"
    if "norm" in words or weight.numel() == max(weight.shape):
        return "qk_norm" if re.search("(?<![a-z])([qk]+_?(norm|ln|scale)|temp)", name) else "norm"
    found = [re.fullmatch("([qkv]+)p?|que.*|keys?|val.*", word) for word in words]
    return "".join(match[1] or match[0][0] for match in found if match) or "o"


class Port:
    """Somebody's layer: its weights, how it is called, and what is seen of it from outside."""

    def __init__(self, layer, n_head, depth, version, causal, names):
        if not callable(layer) or inspect.isclass(layer):
            raise ValueError("no layer, as a module or a function: add layer = YourAttention(...)")
        if not isinstance(layer, torch.nn.Module):  # a function of weights with Microsoft's names
            function = layer
            arm = "diff_v2" if version == 2 else "diff"
            layer = ATTENTION[arm](GPTConfig(attn=arm, n_head=n_head, n_embd=8 * n_head), depth)
            layer.forward = lambda x: function(x, self.drawn)
        self.layer = layer.eval()
        self.version = version
        self.causal = causal
        self.heads = n_head * version // 2
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth) if version == 1 else 0.0
        self.weights = {n: w for n, w in layer.named_parameters() if w.requires_grad}
        self.roles = {name: role_of(name, weight) for name, weight in self.weights.items()}
        self.roles |= {name: role for role, name in names.items()}
        known = re.compile("[qkv]+|o|lambda(_[qk][12])?|gate|(qk_)?norm|bias")
        if self.roles.keys() != self.weights.keys() or not all(map(known.fullmatch, names)):
            raise ValueError(f"names: roles are {known.pattern}, weights {', '.join(self.weights)}")
        self.fused = next((r for r in self.roles.values() if re.fullmatch("[qkv]{2,}", r)), "")

    def draw(self, order="", seed=1, flat=False):
        """Draws weights, and returns {role: [part, ...]} of them, in float64.

        order: of the rows of fused weights. flat: W_q = 0, so that all maps are flat.
        """
        random = torch.Generator().manual_seed(seed)
        loud = {"q": 0.0 if flat else 1.5, "v": 30.0, "bias": 0.0, "qk_norm": 0.0}
        self.drawn = {}
        parts = defaultdict(list)
        for name, weight in self.weights.items():
            role = self.roles[name]
            size = math.sqrt(max(weight.shape, default=1))
            new = torch.randn(weight.shape, generator=random) / size
            if role in LAMBDAS:
                new.fill_(LAMBDAS[role] / seed / size)
            letters = order if role == self.fused else [role]
            for letter, part in zip(letters, torch.atleast_1d(new).chunk(len(letters) or 1)):
                part *= loud.get(letter, 1.0)  # v is so large that the eps of a norm does not show
                part += letter in ("norm", "qk_norm")
                if part.ndim == 3:  # a matrix for each head, (h, C, d) or (h, d, C)
                    part = part.flatten(0, 1).T if letter == "o" else part.mT.flatten(0, 1)
                parts[letter].append(part.double())
            self.drawn[name] = new.requires_grad_()
        return parts

    def run(self, given, x):
        """The output, the first one if there are several, or None where such a call fails."""
        given = {name: x if value == "x" else value for name, value in given.items()}
        try:
            y = torch.func.functional_call(self.layer, self.drawn, (x,), given)
            y = y[0] if isinstance(y, (tuple, list)) else y
            assert y.shape == x.shape, f"it gives {tuple(y.shape)} for {tuple(x.shape)}"
            return y
        except Exception as problem:  # it wants something else. The first problem is kept
            self.problem = getattr(self, "problem", problem)

    def ways(self, depth):
        """A text x (2, T, C), and what is given besides in those calls that run on it."""
        self.draw()
        arguments = list(inspect.signature(self.layer.forward).parameters.values())[1:]
        wanted = [a.name for a in arguments if re.search("mask|causal", a.name)
                  or a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD]
        lengths = [n for m in self.layer.modules() for n in vars(m).values() if type(n) is int]
        widths = [n for weight in self.weights.values() for n in weight.shape[-2:]]
        for T, C in itertools.product([12] + lengths, sorted(set(widths), key=widths.count)[::-1]):
            x = torch.randn(2, T, C, generator=torch.Generator().manual_seed(0))
            ways = {}  # {output: what was given last for it: a layer may keep an old mask}
            for offer in offers(T, C, self.heads, depth, self.lambda_init):
                given = {name: next(offer[words] for words in offer if re.search(words, name))
                         for name in wanted}
                ways[str(self.run(given, x))] = given
            ways.pop("None", None)  # what does not run
            if ways:
                return x, list(ways.values())
        raise ValueError(f"the layer does not run: {getattr(self, 'problem', 'no weights')!r}")

    def look(self, given, x):
        """{mistake: detail}, what is seen from outside."""
        y = self.run(given, x)
        T = x.shape[1]
        if not y.isfinite().all():
            return {"NaN": ""}
        if apart(self.run(given, x), y).max() > TOLERANCE:
            return {"random": ""}
        moved = torch.zeros(T, 2, T)  # [i, b, j]: token j of sample b, by token i of sample 0
        for i in range(T):
            other = x.clone()
            other[0, i] = x[1, i]
            moved[i] = apart(self.run(given, other), y)
        later, earlier = moved[:, 0].triu(1), moved[:, 0].tril(-1)  # than the changed token
        prefix = self.run(given, x[:, :T // 2])
        seen = {}
        if self.causal and earlier.max() > TOLERANCE:
            i, j = divmod(earlier.argmax().item(), T)
            seen["sees the future"] = f"Token {i} moves token {j} by {earlier.max():.1%}."
        elif self.causal and prefix is not None and apart(prefix, y[:, :T // 2]).max() > TOLERANCE:
            seen["length"] = ""
        if later.max() < TOLERANCE:
            seen["no past"] = ""
        if moved[:, 1].max() > TOLERANCE:
            seen["mixes samples"] = f"By {moved[:, 1].max():.1%}."
        weights = {n: w for n, w in self.drawn.items() if w.ndim > 1 or "lambda" in self.roles[n]}
        grads = torch.autograd.grad((y * x).sum(), list(weights.values()), materialize_grads=True)
        dead = [name for name, grad in zip(weights, grads) if not grad.any(-1).all()]  # a row
        seen |= {"dead weights": ", ".join(dead)} if dead else {}
        return seen | self.switch(given, x, y)

    def switch(self, given, x, y):
        """{"switch": its name}, if one of the layer's switches changes the output y."""
        for module, name in [(m, name) for m in self.layer.modules() for name in vars(m)]:
            value = getattr(module, name)
            if type(value) is bool and re.search("flash|fused|sdpa|train", name):
                setattr(module, name, not value)
                z, again = self.run(given, x), self.run(given, x)  # equal without dropout
                setattr(module, name, value)
                if z is not None and torch.equal(z, again) and apart(z, y).max() > TOLERANCE:
                    return {"switch": name}
        return {}


def apart(a, b):
    """How far the tokens of a and b are apart, (B, T), relative to the largest number of b."""
    return ((a - b).abs().amax(-1) / b.abs().max()).detach()


def variants(code, sharp):
    """(rows, code) of the layer with mistakes: those that only sharp maps show, or the others."""
    places = defaultdict(lambda: [("", "BROKEN", "", "", "")])  # no mistake, at no cost
    for row in MISTAKES:
        if row[1] in COST and row[2] and row[2] in code and (row[2] in SHARP) == sharp:
            places[row[2]].append(row)
    for rows in sorted(itertools.product(*places.values()),
                       key=lambda rows: sum(COST[row[1]] for row in rows)):
        changed = code
        for _, _, right, wrong, _ in rows:
            changed = changed.replace(right, wrong)
        yield [row for row in rows if row[0]], changed


def ours(parts, port, sizes):
    """The weights, sizes and numbers of our layer, made of parts of theirs."""
    w = SimpleNamespace(h=port.heads, lambda_init=port.lambda_init)
    w.q, w.k, w.v = [torch.cat(parts[letter]) for letter in "qkv"]
    vars(w).update({role: (parts[role] or [torch.zeros(1)])[0] for role in LAMBDAS})
    sizes(w)
    w.gate = torch.cat(parts["gate"] or [w.q])
    gains = [part.flatten() for part in parts["norm"] if part.numel() in (w.d_v, w.h * w.d_v)]
    if len(gains) != w.h:  # no norm for each head, but one, perhaps in two factors, or none
        gains = [math.prod(gains) if gains else torch.arange(w.d_v) + 1.0]  # 1 would not show
    w.norm = torch.cat(gains).reshape(-1, 1, w.d_v).expand(w.h, 1, w.d_v)
    w.o = torch.cat(parts["o"], 1) if parts["o"] else torch.eye(w.h * w.d_v).double()
    return w


def fit(code, port, parts, x, y, steps):
    """(error, w): our layer, whose factor fits y best; after steps, lambda_init and scale, too."""
    space = dict(globals())
    exec(code, space)

    def residual(numbers):
        w.lambda_init = numbers[0]
        w.scale = numbers[1].exp()
        w.factor = 1.0
        output = space["straight"](x.double(), w)
        w.factor = (output * y).sum() / output.square().sum()
        return (y - w.factor * output).flatten().nan_to_num(math.inf)

    # raised where the weights do not have the sizes of such a layer
    with suppress(RuntimeError, ValueError, IndexError, ZeroDivisionError):
        w = ours(parts, port, space["sizes"])
        numbers = torch.tensor([w.lambda_init, math.log(w.scale)]).double()
        for _ in range(steps):  # of Gauss-Newton
            now = residual(numbers)
            slopes = [(residual(numbers + h) - now) * 1e6 for h in torch.eye(2).double() / 1e6]
            inverse = torch.linalg.pinv(torch.stack(slopes, 1).nan_to_num(), rtol=1e-6)
            numbers -= (inverse @ now).clamp(-1, 1)
        return (residual(numbers).abs().max() / y.abs().max().clamp(min=1e-30)).item(), w
    return math.inf, None


def explain(port, ways, x):
    """({mistake: detail} that make our layer the port, or None, and a sentence)."""
    tries = []  # for each order of fused rows and each way to call it: three draws of its weights
    for order, given in itertools.product(orders(port.fused, port.heads), ways):
        tries.append([(port, port.draw(order, seed, flat), x, port.run(given, x).detach())
                      for seed, flat in ((1, True), (1, False), (2, False))])
    code = PAPER
    for _, kind, right, wrong, _ in MISTAKES:
        if kind in (f"V{port.version}", "causal" if port.causal else "encoder"):
            code = code.replace(right, wrong)
    tries = [draws for draws in tries if fit(code, *draws[0], steps=0)[1]]  # sizes are right
    if not tries:
        return None, NOT_COMPARED
    flats, sharps = [], [math.inf]  # the errors
    until = time.process_time() + 18  # seconds of one core
    for some, flat in variants(code, sharp=False):  # a softmax twice shows lambda even here
        if time.process_time() > until:
            break
        for first, second, third in tries:
            flats.append(fit(flat, *first, 6 if "softmax twice" in str(some) else 0)[0])
            for more, sharp in variants(flat, sharp=True) if flats[-1] < TOLERANCE else ():
                error, w = fit(sharp, *second, steps=6)
                if error < TOLERANCE:  # once more, with other weights
                    error, again = fit(sharp, *third, steps=6)
                sharps.append(error)
                if error < TOLERANCE:
                    return (measured(some + more, port, w, again),
                            f"With these changes our layer equals yours to {error:.0e}.")
    where = f"where q and k are split, turned, compared or subtracted, by {min(sharps):.2g}"
    if min(flats) > TOLERANCE:
        where = f"already where W_q = 0 makes all maps flat, by {min(flats):.2g}"
    return None, (f"Nothing on the list explains it, in {len(flats)} tries: are n_head and causal "
                  f"right? They part {where} of the largest output.")


def measured(rows, port, w, again):
    """{mistake: detail}: the rows, and what the numbers of fits of two draws, w and again, say."""
    found = {row[0]: f"\n         paper: {row[2]}   yours: {row[3]}" for row in rows}
    same = abs(w.lambda_init - again.lambda_init) < 1e-3
    if port.version == 1 and not (same and w.exp_part.any()):  # not the paper's form
        lam = (w.exp_part + w.lambda_init).mean()
        found["lambda" if abs(lam) > 1e-4 else "one map"] = f"It is {lam:.3f} here."
        w.lambda_init = port.lambda_init
    numbers = {"scale": (math.sqrt(w.d), w.scale), "lambda_init": (port.lambda_init, w.lambda_init),
               "factor": (1 - w.lambda_init, w.factor), "value width": (w.width, w.d_v)}
    for name, (paper, yours) in numbers.items():
        if abs(yours - paper) > 1e-3:
            found[name] = f"The paper's is {paper:.4g}, yours is {yours:.4g}."
    return found


class Verdict:
    """kind (the worst), sees_future, explained, and names: broken, differs, choices, same."""

    def __init__(self, found, explained, notes):
        self.explained = explained
        self.sees_future = "sees the future" in found
        self.broken, self.differs, self.choices, self.same = [
            [name for name in found if MISTAKE[name][1] == kind] for kind in COST]
        self.kind = ("BROKEN" if self.broken else "DIFFERS" if self.differs or not explained
                     else "CHOICE" if self.choices else "SAME")
        self.lines = [self.kind]
        for name in self.broken + self.differs + self.choices + self.same:
            _, kind, _, _, text = MISTAKE[name]
            self.lines.append(f"{kind:8} {name}: {text} {found[name]}".replace(" \n", "\n").strip())
        self.lines += notes

    def __str__(self):
        return "\n".join(self.lines)


def diagnose(layer=None, n_head=8, depth=0, version=1, causal=True, names=None):
    """The Verdict on a layer, which is put into eval mode. The page explains the arguments."""
    port = Port(layer, n_head, depth, version, causal, names or {})
    x, ways = port.ways(depth)
    seen = [port.look(given, x) for given in ways]
    found = min(seen, key=len)  # some ways give a mask, and some none: the best ones count
    ways = [given for given, some in zip(ways, seen) if len(some) == len(found)]
    is_sound = not {"NaN", "random", "mixes samples"} & set(found)
    causes, note = explain(port, ways, x) if is_sound else (None, NOT_COMPARED)
    roles = ", ".join(f"{name} is {role}" for name, role in port.roles.items())
    if note is NOT_COMPARED and not found:
        raise ValueError(f"these weights can't be compared: are n_head and names right? {roles}")
    return Verdict(found | (causes or {}), causes is not None,
                   [f"read with {n_head=}, {depth=}, {version=}, {causal=}: {roles}", note])


def main(path, *lines):
    """Prints the verdict on the layer of a file, and returns the exit code."""
    torch.set_num_threads(1)  # for tensors as small as these, more are slower
    stub = MagicMock(flash_attn_func=flash_attn)  # for what needs a GPU
    stub.apply_rotary_emb = lambda q, cos, sin, **_: rotate(q, (cos[:, None], sin[:, None]))
    stub.__spec__ = torch.__spec__  # transformers asks for one
    sys.modules |= {"flash_attn": stub, "triton": None}
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    sys.modules.pop("model", None)  # the port may have a model.py of its own
    sys.path.insert(0, str(Path(path).resolve().parent))
    names = None
    while names is None:
        try:
            names = runpy.run_path(path)
        except ModuleNotFoundError as problem:
            name = inspect.trace()[-1].frame.f_globals["__name__"]  # a module of kernels, or not
            if name == "<run_path>" or not str(problem.name).startswith("triton"):
                name = problem.name
            if sys.modules.get(name) is stub:
                raise
            print(f"{name} can't be imported here, a stand-in is in its place")
            sys.modules[name] = stub
    exec("\n".join(lines), names)
    said = {name: names[name] for name in inspect.signature(diagnose).parameters if name in names}
    print(verdict := diagnose(**said))
    return verdict.kind in ("BROKEN", "DIFFERS")


def flash_attn(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    q, k, v = [m.transpose(1, 2) for m in (q, k, v)]  # from (B, T, H, d)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True,
                                          scale=softmax_scale).transpose(1, 2)


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print(PAGE.split("## ")[0])
        sys.exit(len(sys.argv) == 1)
    try:
        sys.exit(main(*sys.argv[1:]))
    except Exception as problem:
        sys.exit(f"{type(problem).__name__}: {problem}")
