"""Each mistake on the list is found, alone and beside others."""
import itertools
import math
import re
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from port import diagnose, paper
from port.compare import ours
from port.mistakes import BROKEN, BY_CODE, BY_NUMBER, MISTAKES, find
from port.paper import lambda_init_of
from port.roles import role_of
from port.theirs import Reading

torch.set_num_threads(1)  # for tensors as small as these, more are slower

GROUPED = [m for m in BY_CODE if m.only == "grouped"]  # here all heads have keys of their own
ALONE = [m for m in BY_CODE if m not in GROUPED]
NUMBERS = {"scale": dict(scale=4.0), "factor": dict(factor=1.0),
           "lambda_init": dict(lambda_init=0.3, factor=0.7)}
COMMON = ["no mask", "merge not transposed", "no norm", "norm over time", "mean subtracted",
          "no rotary", *NUMBERS]


def made_with(mistakes, version=1, **numbers):
    """A function layer(x, w): the paper's layer in float64 with mistakes, of depth 3."""
    steps = paper.steps_of(version, causal=True)
    for mistake in mistakes:
        steps = replace(steps, **mistake.steps)
    reading = Reading(8 if version == 1 else 4, 3, version, causal=True)

    def layer(x, weights):
        parts = defaultdict(list)
        for name, weight in weights.items():
            parts[role_of(name, weight)].append(weight.double())
        w = ours(parts, reading)
        w.factor = 1 - w.lambda_init if version == 1 else 1.0
        for name, number in numbers.items():
            setattr(w, name, number)
        return paper.layer(x.double(), w, steps).float()

    return layer


def names(verdict):
    return set(verdict.differs + verdict.choices + verdict.same)


@pytest.mark.parametrize("mistake", ALONE, ids=[f"{m.name}: {m.function.__name__}" for m in ALONE])
def test_each_mistake_alone(mistake):
    version = 2 if mistake.only == "version 2" else 1
    n_head = 4 if version == 2 else 8
    verdict = diagnose(made_with([mistake], version), n_head, 3, version)
    assert names(verdict) == {mistake.name}
    assert verdict.sees_future == mistake.leaks
    assert verdict.kind == (BROKEN if mistake.leaks else mistake.verdict)


@pytest.mark.parametrize("one, other", list(itertools.combinations(COMMON, 2)))
def test_pairs_of_the_commonest(one, other):
    if {one, other} <= {"no norm", "norm over time"} or {one, other} == {"factor", "lambda_init"}:
        pytest.skip("a layer has one norm or none, and lambda_init has a factor of its own")
    if {one, other} == {"no norm", "mean subtracted"}:
        pytest.skip("without a norm no mean is subtracted")
    numbers = NUMBERS.get(one, {}) | NUMBERS.get(other, {})
    mistakes = [find(name) for name in (one, other) if name not in NUMBERS]
    verdict = diagnose(made_with(mistakes, **numbers), 8, 3)
    assert verdict.explained and names(verdict) == {one, other}


def test_three_at_once():
    mistakes = [find("norm over time"), find("mean subtracted")]
    verdict = diagnose(made_with(mistakes, **NUMBERS["lambda_init"]), 8, 3)
    assert verdict.kind == "BROKEN"
    assert names(verdict) == {"norm over time", "mean subtracted", "lambda_init"}


def test_the_list_has_a_sentence_for_each_and_steps_of_the_paper():
    for mistake in MISTAKES:
        assert len(mistake.sentence) > 20 and mistake.sentence.endswith(".")
    for mistake in BY_CODE:
        assert mistake.port_code.strip() != mistake.paper_code.strip()
        replace(paper.PAPER, **mistake.steps)  # a TypeError if the paper has no such step


@pytest.mark.parametrize("mistake", BY_NUMBER + BY_CODE, ids=lambda mistake: mistake.name)
def test_a_sentence_says_what_the_port_does_and_then_what_the_paper_does(mistake):
    theirs, papers = re.split(r"\. In (?:the paper|version 2)\b", mistake.sentence, maxsplit=1)
    assert len(theirs) > 15 and len(papers) > 10


def test_the_papers_layer_in_steps_is_model_py():
    from model import Diff, GPTConfig

    layer = Diff(GPTConfig(n_embd=64, n_head=8), depth=3).double()
    x = torch.randn(2, 12, 64, dtype=torch.float64)
    y = made_with([])(x, dict(layer.named_parameters()))
    assert (layer(x) - y).abs().max() < 1e-5 and math.isclose(layer.lambda_init, lambda_init_of(3))
