"""What was found of a port: entries of the list, each with what is particular to this port."""
import math
import textwrap

import torch

from port import paper
from port.mistakes import CHOICE, DIFFERS, find
from port.paper import lambda_init_of


class Finding:
    """An entry of the list, and a detail.

    of_layer: the number of the other layer whose lambda_init this layer has, if there is one.
    """

    def __init__(self, mistake, detail="", of_layer=None):
        self.mistake = mistake
        self.name = mistake.name
        self.kind = mistake.verdict
        self.detail = detail
        self.of_layer = of_layer

    def __str__(self):
        text = f"{self.kind:8} {self.name}: {self.mistake.sentence} {self.detail}".rstrip()
        text = textwrap.fill(text, 100, subsequent_indent=" " * 9, break_on_hyphens=False)
        if self.mistake.steps:
            text += show("the paper", self.mistake.paper_code)
            text += show("yours is like", self.mistake.port_code)
        return text


def show(title, code):
    return "\n" + textwrap.indent(f"{title}:\n" + textwrap.indent(code, "    "), " " * 9)


def join(seen, causes):
    """What was seen from outside and what explains it, without saying one thing twice."""
    names = {finding.name: finding for finding in seen + causes}
    dropped = []
    for name, text in (("no norm", "Yours is built and never used"),
                       ("no norm weight", "Yours is there and not used")):
        if "unused norm" in names and name in names:
            names[name].detail = f"{text}: {names['unused norm'].detail}."
            dropped.append("unused norm")
    if "sees the future" in names and leaks_behind_a_mask(causes):
        names["sees the future"].detail += (" It does so in spite of a mask: norms and reshapes "
                                            "leak, too.")
    if "dead weights" in names and "lambda" in names and "lambda" in names["dead weights"].detail:
        names["dead weights"].detail += f". lambda is a constant. {names['lambda'].detail}"
        dropped.append("lambda")
    return [finding for finding in seen + causes if finding.name not in dropped]


def leaks_behind_a_mask(causes):
    """Whether something leaks, and what makes the maps does not."""
    steps = [finding.mistake.step for finding in causes if finding.mistake.leaks]
    return bool(steps) and not {"maps", "subtract"} & set(steps)


def from_search(found, tolerance):
    """Findings of the mistakes, and of the fitted numbers that are not the paper's."""
    reading, w = found.reading, found.w
    near = nearness(tolerance)
    findings = [Finding(mistake) for mistake in found.mistakes]
    lambda_init = reading.lambda_init
    if reading.version == 0:
        findings.append(Finding(find("plain softmax")))
    if reading.version == 1:
        if found.has_the_papers_lambda(near):
            lambda_init = float(w.lambda_init)
            findings += of_lambda_init(lambda_init, reading.depth, near)
        else:
            findings += of_lambda(float((w.exp_part + w.lambda_init).mean()), near)
    findings += of_number("scale", math.sqrt(w.d), w.scale, near)
    is_papers = abs(lambda_init - reading.lambda_init) <= near
    whose = "The paper's" if is_papers else "With your lambda_init the paper's"
    findings += of_number("factor", 1 - lambda_init, w.factor, near, whose)
    if reading.version > 0:
        findings += of_number("value width", w.paper_d_v, w.d_v, near)
    return findings + of_rotary(w, near) + of_norm_weight(found)


def of_norm_weight(found):
    """Whether each head has a weight of its own, in a norm that is otherwise the paper's."""
    weight = found.w.norm
    is_one_for_all = torch.equal(weight, weight[:1].expand_as(weight))
    if found.reading.version != 1 or found.steps.norm is not paper.norm or is_one_for_all:
        return []
    return [Finding(find("norm weight for each head"))]


def nearness(tolerance):
    """Numbers that are closer than this count as equal."""
    return max(1e-3, tolerance)


def of_number(name, expected, yours, near, whose="The paper's"):
    if abs(yours - expected) <= near:
        return []
    return [Finding(find(name), f"{whose} is {expected:.4g}, yours is {yours:.4g}.")]


def of_lambda(lam, near):
    if abs(lam) < near / 10:
        return [Finding(find("one map"))]
    return [Finding(find("lambda" if lam > 0 else "lambda negative"), f"It is {lam:.3f} here.")]


def of_lambda_init(yours, depth, near):
    """Another layer's number is a slip. Any other one may be a constant that is meant."""
    expected = lambda_init_of(depth)
    if abs(yours - expected) <= near:
        return []
    detail = f"The paper's is {expected:.4f} for depth = {depth}, yours is {yours:.4f}"
    for other in range(-1, 13):
        if other != depth and abs(yours - lambda_init_of(other)) < near / 4:
            detail += f", that of layer {other}. Is depth right, and passed on?"
            return [Finding(find("lambda_init", DIFFERS), detail, of_layer=other)]
    verdict = CHOICE if 0 < yours < 1 else DIFFERS
    return [Finding(find("lambda_init", verdict), detail + ".")]


def of_rotary(w, near):
    """theta and the share of the channels that turn, if they had to be fitted."""
    findings = []
    theta = float(w.theta)
    if w.turned < w.d:
        detail = f"Yours turns {w.turned} of {w.d}."
        findings.append(Finding(find("rotary share"), detail))
    if w.turned > 2 and abs(theta / 10000 - 1) > near:  # two channels turn by 1, whatever theta is
        name = "rotary table" if abs(theta / 100 - 1) < 10 * near else "rotary base"
        detail = f"The paper's is 10000, yours is {theta:.6g}."
        findings.append(Finding(find(name), detail))
    return findings
