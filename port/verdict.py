"""The verdict on a port: what is seen from outside, and what makes the paper's layer into it."""
from port import findings, further, given, lambdas, misread, outside, stand_ins
from port.mistakes import BROKEN, CHOICE, DIFFERS, NOTE, SAME, find
from port.outside import NOT_SOUND
from port.problems import NoVerdict
from port.roles import in_short, is_obvious
from port.search import SECONDS, Clock, Search
from port.theirs import Port, Reading


class Verdict:
    """The result.

    kind: the worst finding. explained: whether our layer was made equal.
    broken, differs, choices, same: names of findings. sees_future: whether one of them is that.
    lines: what is printed.
    """

    def __init__(self, found, explained, notes):
        self.explained = explained
        order = [BROKEN, DIFFERS, CHOICE, SAME, NOTE]
        found = sorted(found, key=lambda finding: order.index(finding.kind))
        self.broken, self.differs, self.choices, self.same = [
            [finding.name for finding in found if finding.kind == kind] for kind in order[:4]
        ]
        self.sees_future = "sees the future" in self.broken
        if self.broken:
            self.kind = BROKEN
        elif self.differs or not explained:
            self.kind = DIFFERS
        else:
            self.kind = CHOICE if self.choices else SAME
        first = self.kind if explained or self.broken else f"{self.kind}, not explained"
        self.lines = [first, *map(str, found), *notes]

    def __str__(self):
        return "\n".join(self.lines)


def diagnose(layer=None, n_head=8, depth=None, version=1, causal=True, names=None):
    """The Verdict on a layer, (B, T, C) to (B, T, C), which is put into eval mode.

    layer: a torch module, or a function layer(x, w) of weights with Microsoft's names.
    n_head: how many maps, two for each head. In version 2 it counts heads.
    depth: the number of the layer, counted from 0. If None, 0 is assumed, and that is said. There
    is no verdict if lambda_init is another layer's, and nothing else is wrong.
    names: {role: the name of a weight, or a list of names}, where the guess is wrong.
    Raises ValueError with a sentence that helps, where no verdict is possible.
    """
    is_told = depth is not None
    port = Port(layer, Reading(n_head, depth if is_told else 0, version, causal), names)
    x, ways = port.ways()
    port.read_shapes(x.shape[2])
    port.transposed, port.unclear = outside.how_matrices_lie(port, ways[0], x)
    seen = outside.look(port, x, ways)
    found = [findings.Finding(find(name), detail) for name, detail in seen.mistakes.items()]
    causes = None
    way = seen.ways[0]
    if NOT_SOUND & seen.mistakes.keys():
        note = "It is not compared with the paper's layer: that needs sound outputs."
    else:
        try:
            causes, note, way = explain(port, seen)
        except NoVerdict as reason:
            if not any(finding.kind == BROKEN for finding in found):  # a note is no verdict
                raise
            note = f"It is not compared with the paper's layer: {reason}"
    found = findings.join(found, causes or []) + notes_on(port, seen)
    if not is_told:
        refuse_an_assumed_depth(found)
    notes = [how_it_was_read(port, is_told)]
    called = how_it_was_called(way)
    if called:
        notes.append(called)
    return Verdict(found, causes is not None, [*notes, note])


def explain(port, seen):
    """(findings or None, a sentence, the way it was called).

    NoVerdict if there is nothing that can be compared.
    """
    clock = Clock()
    refuse_what_is_misread(port, seen, clock)
    seconds = 3 if "no past" in seen.mistakes else SECONDS
    search = Search(port, port.said, seen, clock, seconds)
    if not search.tries:
        raise NoVerdict(misread.what_does_not_fit(port, seen.x.shape[2]))
    found = None if port.has_lambda() else misread.as_plain_softmax(port, seen, clock)
    if not found:
        found = search.run()
    if found:
        causes, note = what_explains(port, seen, found)
        return causes, note, found.draw.way
    return None, why_not(port, seen, search, clock), seen.ways[0]


def why_not(port, seen, search, clock):
    """A sentence where nothing explains the layer. NoVerdict if another number of maps does."""
    if "no past" in seen.mistakes:
        return "Mend that first, and run again: the rest can't be compared so."
    if not port.tells_n_head():
        reading = misread.better_reading_by_trying(port, seen, clock)
        if reading:
            raise NoVerdict(reading)
    if port.has_lambda():
        doubt = doubts(port, seen)
    else:
        doubt = "No weight is a lambda: is it differential attention?"
    return f"{search.where_it_failed()} {doubt}".strip()


def refuse_an_assumed_depth(found):
    """NoVerdict if the layer is only wrong in that it was taken for the first one."""
    wrong = [finding for finding in found if finding.kind in (BROKEN, DIFFERS)]
    if len(wrong) == 1 and wrong[0].of_layer is not None and wrong[0].of_layer > 0:
        other = wrong[0].of_layer
        raise NoVerdict(f"is depth = {other} meant? It was not said, and lambda_init is that of "
                        f"layer {other}")


def doubts(port, seen):
    """A question on what was said or guessed, and may be wrong where nothing explains the layer."""
    asked = []
    if not port.tells_n_head():
        asked.append("is n_head right")
    if seen.sees_future or not port.said.causal:
        asked.append("is causal right")
    if port.unclear:
        asked.append(f"is a weight transposed ({', '.join(in_short(sorted(port.unclear)))})")
    question = ", or ".join(asked)
    return f"{question[:1].upper()}{question[1:]}?" if asked else ""


def refuse_what_is_misread(port, seen, clock):
    """NoVerdict if the layer is not what it was said to be, or if weights have no role."""
    block = misread.is_a_block(port, seen.ways[0], seen.x)
    if block:
        raise NoVerdict(block)
    unknown = [name for name, role in port.roles.items() if role == "unknown"]
    if unknown and "dead weights" not in seen.mistakes:
        raise NoVerdict(misread.ask_for_names(port, unknown))
    reading = misread.better_reading(port, seen, clock)
    if reading:
        raise NoVerdict(reading)


def what_explains(port, seen, found):
    """(findings, a sentence) of what makes our layer equal to the port."""
    if port.vectors_in:
        lambdas.name_vectors(port, found, findings.nearness(seen.tolerance))
    causes = findings.from_search(found, seen.tolerance)
    if port.transposed:
        names = ", ".join(in_short(sorted(port.transposed)))
        causes.append(findings.Finding(find("weights transposed"), f"Here: {names}."))
    later = further.look(port, found, seen)
    start = "Our layer equals"
    if later:
        start = "Otherwise our layer equals"
    elif any(cause.kind not in (SAME, NOTE) for cause in causes):
        start = "With these changes our layer equals"
    elif any(cause.kind == SAME for cause in causes):
        start = "With its weights in this order our layer equals"
    return causes + later, f"{start} yours to {found.error:.0e}."


def notes_on(port, seen):
    """Findings that do not change the verdict."""
    found = []
    zeros = outside.starts_from_zeros(port, seen.ways[0], seen.x)
    if zeros:
        found.append(findings.Finding(find("start from zeros"), ", ".join(in_short(zeros))))
    far = lambdas.far_start(port)
    if far:
        found.append(findings.Finding(find("start of lambda"), far))
    if seen.rounds:
        found.append(findings.Finding(find("rounding"), f"Here that is {seen.tolerance:.0e}."))
    return found


def how_it_was_called(way):
    """What forward got besides x. What it did not get, None, is no news."""
    given_to = {name: value for name, value in way.arguments.items() if value is not None}
    words = [f"{name}: {given.in_words(value)}" for name, value in given_to.items()]
    return f"called with {'; '.join(words)}" if words else ""


def how_it_was_read(port, depth_is_told):
    """What was said, what was guessed of weights whose names leave a doubt, and stand-ins."""
    said = port.said
    depth = said.depth if depth_is_told else "0 (assumed)"
    text = (f"read with n_head={said.n_head}, depth={depth}, version={said.version}, "
            f"causal={said.causal}")
    guesses = []
    for name, role in port.roles.items():
        if name in port.vectors_in:
            guesses.append(f"{name} as {' and '.join(port.vectors_in[name])}")
        elif name not in port.told and not is_obvious(name, role):
            guesses.append(f"{name} as {role}")
    packages = stand_ins.packages(stand_ins.in_use())
    used = [f"a stand-in for {package}" for package in packages]
    text = ", ".join([text, *in_short(guesses), *used])
    missing = ", ".join(port.missing_roles())
    return f"{text}. Not found: {missing}" if missing else text
