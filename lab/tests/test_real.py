"""real.md and lists.md say what real.json says. The programs that measured it are at 1b1cb9d."""
import math
from statistics import fmean

import pytest

from lab.stats import RESULTS, plus_minus, read_json
from lab.tests.pages import words_of

RUNS = read_json(RESULTS / "real.json")[1]
LISTS = {(run["mean"], run["crowd"]): run for run in RUNS if run["what"] == "lists"}
MEANS = {"own": "the mean of this list's values", "another": "the mean of another list's values",
         "fixed": "a fixed vector"}


def lines_of(page):
    text = (RESULTS / page).read_text(encoding="utf-8").replace("−", "-")
    return [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("name, heads, text", [
    ("look-up, manual", "look-up", "manual"), ("look-up, addresses", "look-up", "addresses"),
    ("random, manual", "random", "manual"), ("random, addresses", "random", "addresses"),
    ("Gemma 3 270M, manual", "Gemma 3 270M", "manual"),
    ("Gemma 3 270M, addresses", "Gemma 3 270M", "addresses"),
])
def test_a_row_of_real(name, heads, text):
    """more: of the oracle everywhere, its control, the oracle where votes decide, its control."""
    runs = [run for run in RUNS if (run.get("heads"), run.get("text")) == (heads, text)]
    votes = fmean(run["more"][3] - run["more"][2] for run in runs)
    everywhere = fmean(run["more"][1] - run["more"][0] for run in runs)
    pairs = sum(run["pairs"] for run in runs)
    shares = [100 * sum(run[of] for run in runs) / pairs for of in ("c_above_r", "decide")]
    (line,) = [line for line in lines_of("real.md") if line.startswith(f"| {name} |")]
    cells = [cell.split(" (")[0] for cell in line.strip("| ").split(" | ")]
    gains = [plus_minus(votes, math.nan, digits=4), plus_minus(everywhere, math.nan)]
    assert cells == [name, str(len(runs)), *gains, f"{shares[0]:.0f} %", f"{shares[1]:.1f} %"]


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("what, scale, digits", [("logp", 1, 2), ("right", 100, 1)])
def test_a_row_of_lists(mean, what, scale, digits):
    gains = [scale * (fmean(LISTS[mean, crowd][what]) - fmean(LISTS["nothing", crowd][what]))
             for crowd in (0, 16)]
    rows = [line.strip("| ").split(" | ") for line in lines_of("lists.md")]
    rows = [[cell.split(" (")[0] for cell in row[1:3]] for row in rows if row[0] == MEANS[mean]]
    assert [f"{gain:.{digits}f}" for gain in gains] in rows


def deleted(heads, text, oracle, control):
    """How much of the oracle's weight its control deleted, like "56 %". See test_a_row_of_real."""
    found = [run["deleted"] for run in RUNS if (run.get("heads"), run.get("text")) == (heads, text)]
    return f"{100 * sum(run[control] for run in found) / sum(run[oracle] for run in found):.0f} %"


@pytest.mark.parametrize("said, oracle, control", [
    ("control deletes only {} as much on the manual and {} on the addresses (in Gemma {} and {})",
     2, 3),
    ("Everywhere they delete {} as much on the manual and {} on the addresses (in Gemma {} and {}, "
     "in random heads 34 %)", 0, 1),
])
def test_what_the_controls_deleted(said, oracle, control):
    shares = [deleted(heads, text, oracle, control) for heads in ("look-up", "Gemma 3 270M")
              for text in ("manual", "addresses")]
    assert said.format(*shares) in words_of("real.md")


def test_how_many_answers_are_right_without_a_minus():
    shares = [f"{100 * fmean(LISTS['nothing', crowd]['right']):.1f} %" for crowd in (0, 16)]
    assert "{} are right, and {} beside the crowd".format(*shares) in words_of("lists.md")
