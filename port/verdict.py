"""The verdict on a layer: what is seen from outside, and what makes the paper's layer into it."""
import math
import textwrap

from port import outside, search
from port.mistakes import BROKEN, CHOICE, DIFFERS, KINDS, NOTE, SAID, SAME, UNCLEAR
from port.paper import lambda_init_of
from port.reading import read
from port.roles import VECTORS, NoVerdict, in_short
from port.theirs import Theirs

NOT_LOOKED_AT = ("Not looked at: a cache; gradients, but for those that are 0; one head's lambda "
                 "alone, and the eps of the norm; biases, and the weights of a norm of queries.")


class Verdict:
    """kind: the worst finding. names: {kind: names of findings}. str() is what is printed."""

    def __init__(self, found, explained, notes):
        found = sorted(found, key=lambda finding: KINDS.index(finding[0].kind))
        self.explained = explained
        self.names = {kind: [m.name for m, _ in found if m.kind == kind] for kind in KINDS}
        kinds = [m.kind for m, _ in found if m.kind != NOTE] + [SAME if explained else DIFFERS]
        self.kind = min(kinds, key=KINDS.index)
        is_clear = explained or self.kind == BROKEN
        self.lines = [self.kind if is_clear else f"{self.kind}, not explained"]
        for mistake, detail in found:
            text = f"{mistake.kind:8} {mistake.name}: {mistake.text} {detail}".rstrip()
            self.lines.append(textwrap.fill(text, 100, subsequent_indent=" " * 9))
            if mistake.step and mistake.kind != SAME:
                self.lines.append(textwrap.indent(mistake.code(), " " * 9))
        self.lines += [textwrap.fill(note, 100) for note in (*notes, NOT_LOOKED_AT)]

    def __str__(self):
        return "\n".join(self.lines)


def diagnose(layer=None, n_head=None, depth=None, version=None, causal=True, names=None):
    """The Verdict on a torch module, (B, T, C) to (B, T, C), which is put into eval mode.

    n_head (maps, two for each head; in version 2 heads), version and depth (counted from 0) are
    needed only where no weight shows them. names: {role: name or names of weights}, where the guess
    is wrong. Raises NoVerdict, a ValueError with a sentence that helps.
    """
    theirs = Theirs(layer, names, causal)
    x, readings, calls = read(theirs, n_head, version, depth)
    theirs = theirs.read_as(transposed=outside.transposed(theirs, x, calls[0][1]))
    seen = outside.look(theirs, x, calls, readings[0].h)
    findings = [(SAID[name], detail) for name, detail in seen.mistakes.items()]
    zeros = zero_vectors(theirs)
    if zeros:
        findings.append((SAID["start from zeros"], zeros))
    if not seen.is_sound:
        return Verdict(findings, False, [*how_it_was_read(theirs, readings[0], seen),
                                         "So it is not compared with the paper's layer."])
    if outside.is_a_block(theirs, x, seen.given):
        raise NoVerdict("with all its matrices 0 the layer still gives something, so it adds a "
                        "residual. Give the attention alone, as layer = block.attn")
    unused = {name: "unused" for name in outside.without_gradient(theirs, x, seen.given, 0)
              if theirs.roles[name] == "norm"}
    theirs = theirs.read_as(roles=theirs.roles | unused)
    tried = search.Search(theirs, readings, seen)
    if not tried.tries:
        problem = what_does_not_fit(theirs, readings[0])
        if not any(mistake.kind == BROKEN for mistake, _ in findings):
            raise NoVerdict(problem)
        return Verdict(findings, False, [*how_it_was_read(theirs, readings[0], seen),
                                         f"It is not compared with the paper's layer: {problem}"])
    found = tried.run()
    reading, last_line = readings[0], tried.why_not()
    if not any(role.startswith(("lambda", "gate")) for role in theirs.roles.values()):
        last_line += " No weight is a lambda."
    if found:
        reading = found.at.reading
        causes = causes_of(theirs, found, seen)
        findings += causes
        ours = "With these changes our layer" if causes else "Our layer"
        last_line = f"{ours} equals yours to {found.error:.0e}."
    if n_head not in (None, reading.n_head):
        raise NoVerdict(f"is n_head = {reading.n_head} meant? With this it is explained")
    verdict = Verdict(findings, bool(found), [*how_it_was_read(theirs, reading, seen), last_line])
    if verdict.kind in (CHOICE, SAME) and verdict.names[UNCLEAR]:
        raise NoVerdict(f"it would be {verdict.kind}, but\n{verdict}")
    return verdict


def causes_of(theirs, found, seen):
    """[(mistake, detail), ...]: what was found by trying, by fitting, and beyond."""
    near = max(1e-3, seen.tolerance)
    form = search.form_of_lambda(theirs, found, near)
    causes = [(mistake, "") for mistake in found.mistakes]
    causes += [(SAID[name], detail) for name, detail in (
        *of_lambda(found, form, near, seen), *of_numbers(found, form, near))]
    if theirs.transposed:
        causes.append((SAID["weights transposed"], in_short(theirs.transposed)))
    if not seen.leaks:
        causes += [(SAID[name], detail) for name, detail in
                   search.beyond(theirs, found, seen, form)]
    return causes


def of_lambda(found, form, near, seen):
    """[(name, detail), ...]"""
    if found.at.reading.version == 2:
        return []
    if form:
        return of_lambda_init(form[0], found.at.reading.depth, near)
    name = "lambda" if found.w.lam > 0 else "lambda negative"
    if name == "lambda" and "dead weights" in seen.mistakes:  # one thing is said once
        return []
    return [(name, f"It is {float(found.w.lam):.3f} here.")]


def of_lambda_init(yours, depth, near):
    """[(name, detail)]: another layer's number is a slip. Any other may be a constant that is
    meant."""
    layers = [n for n in range(-1, 24) if abs(yours - lambda_init_of(n)) < near / 4]
    if abs(yours - 0.8) < near:  # that of no layer, though the late ones come near
        layers = []
    if depth is None and layers and layers[0] >= 0:
        return []
    if abs(yours - lambda_init_of(depth or 0)) < near:
        return []
    detail = f"Yours is {yours:.4f}" + (f", that of layer {layers[0]}." if layers else ".")
    is_choice = not layers and 0.01 < yours < 1
    return [("constant lambda_init" if is_choice else "lambda_init", detail)]


def of_numbers(found, form, near):
    """[(name, detail), ...]: the other numbers that were fitted."""
    w, reading = found.w, found.at.reading
    factors = [1.0]
    if reading.version == 1:
        factors = [1 - lambda_init_of(reading.depth or 0)]
        if form:
            factors = [1 - form[0]] + factors * (reading.depth is not None)  # either is right
    papers_and_yours = {
        "scale": (math.sqrt(w.d), float(w.scale)),
        "factor": (min(factors, key=lambda one: abs(one - w.factor)), float(w.factor)),
        "value width": (w.d * 2 // reading.version, w.d_v),
    }
    causes = [(name, f"The paper's is {papers:.4g}, yours is {yours:.4g}.")
              for name, (papers, yours) in papers_and_yours.items() if abs(papers - yours) > near]
    if w.turned < w.d:
        causes.append(("rotary share", f"Yours turns {w.turned} of {w.d}."))
    if abs(float(w.theta) / 1e4 - 1) > near and w.turned > 2:
        name = "rotary table" if abs(float(w.theta) / 100 - 1) < 10 * near else "rotary base"
        causes.append((name, f"Yours is {float(w.theta):.6g}."))
    return causes


def zero_vectors(theirs):
    """Names of lambda's vectors that start at 0 in both of a pair."""
    zeros = {role: name for name, role in theirs.roles.items()
             if role in VECTORS and not theirs.weights[name].any()}
    pairs = [VECTORS[:2], VECTORS[2:]]
    return ", ".join(zeros[role] for pair in pairs if set(pair) <= zeros.keys() for role in pair)


def how_it_was_read(theirs, reading, seen):
    """Lines for the user."""
    depth = reading.depth
    if depth is None:
        depth = "any" if reading.version == 2 else "that of its lambda_init"
    held = dict(bias=", held at 0", qk_norm=", held at 1")  # so what they do is not seen
    roles = dict.fromkeys(f"{in_short([name])} as {role}{held.get(role, '')}"
                          for name, role in theirs.roles.items())
    lengths = ", ".join(map(str, sorted({*seen.lengths, seen.x.shape[1]})))
    lines = [f"Read with n_head={reading.n_head}, depth={depth}, version={reading.version}, "
             f"causal={reading.causal}; {', '.join(roles)}. Texts of {lengths} tokens."]
    given = [name for name, value in seen.given.items() if value is not None]
    return lines + [f"Called with {', '.join(given)}."] * bool(given)


def what_does_not_fit(theirs, reading):
    sizes = ", ".join(f"{name} {tuple(weight.shape)} as {theirs.roles[name]}"
                      for name, weight in theirs.weights.items())
    return (f"with n_head = {reading.n_head} its weights do not have the sizes of such a layer: "
            f"{sizes}. Are n_head, version and names right? A matrix is read as (outputs, inputs) "
            "or (inputs, outputs), or as one for each head, (h, ...)")
