"""Each mistake on the list is found, alone and beside others."""
import itertools
from collections import defaultdict

import pytest
import torch

from port import diagnose, paper, search
from port.mistakes import BY_TRYING, SAID
from port.tests import right_layers as right

torch.set_num_threads(1)


class Made(right.Right):
    """The paper's layer with mistakes, whose code is ours."""

    def __init__(self, *mistakes, causal=True, **numbers):
        super().__init__()
        self.steps = paper.steps_of(1, causal, **{m.step: m.yours for m in mistakes})
        self.numbers = dict(init=right.INIT, factor=1 - right.INIT) | numbers

    def forward(self, x):
        weight = {name: w.double() for name, w in self.named_parameters()}
        names = dict(q="q_proj", k="k_proj", v="v_proj", o="out_proj", norm="subln")
        parts = {letter: [weight[f"{name}.weight"]] for letter, name in names.items()}
        w = search.ours(defaultdict(list, parts), h=4, version=1)
        vars(w).update(self.numbers)
        first, second = [(weight[f"lambda_q{i}"] @ weight[f"lambda_k{i}"]).exp() for i in (1, 2)]
        w.lam = first - second + w.init
        return paper.layer(x.double(), w, self.steps).float()


# the others need another layer, and stand in test_layers.py
ALONE = [m for m in BY_TRYING if m.version != 2 and not m.grouped and m.name != "values apart"]
NUMBERS = {"scale": dict(scale=4.0), "factor": dict(factor=1.0),
           "lambda_init": dict(init=paper.lambda_init_of(4), factor=1 - paper.lambda_init_of(4))}
COMMON = ["no mask", "no norm", "norm over time", "mean subtracted", "no rotary", *NUMBERS]
NEVER = [{"no norm", "norm over time"}, {"no norm", "mean subtracted"}, {"factor", "lambda_init"}]
PAIRS = [pair for pair in itertools.combinations(COMMON, 2) if set(pair) not in NEVER]


def names_in(verdict):
    found = {name for names in verdict.names.values() for name in names}
    return found - {"sees the future", "unused norm"}


@pytest.mark.parametrize("mistake", ALONE, ids=lambda m: m.name)
def test_each_mistake_alone(mistake):
    verdict = diagnose(Made(mistake), depth=3)
    assert names_in(verdict) == {mistake.name}
    assert ("sees the future" in verdict.names["BROKEN"]) == mistake.leaks


OF_MAPS = [m for m in ALONE if m.step == "subtract" and not m.leaks]


@pytest.mark.parametrize("mistake", OF_MAPS, ids=lambda m: m.name)
def test_those_that_take_maps_alone_in_an_encoder(mistake):
    verdict = diagnose(Made(mistake, causal=False), depth=3, causal=False)
    assert names_in(verdict) == {mistake.name}


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_pairs_of_the_commonest(pair):
    mistakes = [next(m for m in BY_TRYING if m.name == name) for name in pair
                if name not in NUMBERS]
    numbers = NUMBERS.get(pair[0], {}) | NUMBERS.get(pair[1], {})
    assert names_in(diagnose(Made(*mistakes, **numbers), depth=3)) == set(pair)


def test_each_says_what_the_port_does_and_then_what_the_paper_does():
    for mistake in BY_TRYING:
        assert ". In " in mistake.text and mistake.text.endswith(".")
    assert all(mistake.text.endswith((".", ".)")) for mistake in SAID.values())


def test_what_follows_the_maps_knows_nothing_of_the_steps_before():
    """search.Draw keeps maps for all mistakes that come after them."""
    s = paper.steps_of(version=1, causal=True)
    assert set(paper.BEFORE_MAPS) < set(vars(s))
    for step in paper.BEFORE_MAPS:
        delattr(s, step)
    A = torch.rand(2, 4, 2, 12, 12)
    w = type("w", (), dict(lam=0.5, factor=1.0, norm=torch.ones(4, 1, 16), o=torch.eye(64)))
    y = paper.after_maps((A, A, torch.rand(2, 4, 1, 12, 16)), None, w, s)
    assert y.shape == (2, 12, 64)
