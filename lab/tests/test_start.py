"""start.md, its record, text.md and predictions.md say what toys.json says."""
from statistics import fmean

import pytest

from lab import compare, start, stats, toys
from lab.compare import Results
from lab.tests.pages import has_part, words_of
from lab.toys import AS_DRAWN, Cell, Runs

RUNS = stats.read_json(compare.TOYS_JSON)[1]
LOOKS = stats.read_json(stats.RESULTS / "stream.json")[1]
RESULTS = Results(RUNS)
LONGER = dict(text="stdlib", steps=2000)
LARGER = dict(size="2.7 M")


def less(a, b, std=AS_DRAWN, head="own", **where):
    """row a − row b, like "0.123 ± 0.004"."""
    pair = RESULTS.pair(*(Cell(row, head, **where) for row in (a, b)), std)
    return stats.plus_minus(*stats.difference(*pair))


def test_the_pages_have_the_tables_of_the_data():
    for name, part in start.parts_of(RESULTS).items():
        page = "start-record.md" if name in start.ON_RECORD else "start.md"
        assert has_part(page, part)
    n = len(start.measured(RESULTS))
    assert f"corrected for the {n} differences" in words_of("start.md")


def test_the_low_rate():
    at_low = RESULTS.losses(Cell("softmax", "own"), 1.0, lr=start.LOW, seeds=start.FEW)
    cost = fmean(at_low) - fmean(RESULTS.losses(Cell("softmax", "own"), 1.0))
    assert f"0.0005, softmax is {cost:.2f} worse than at its own rate" in words_of("start.md")
    leads = []
    for row in ("diff", "softmax with a norm"):
        for where in (LONGER, LARGER):
            pair = RESULTS.pair(Cell("softmax", "own", **where), Cell(row, "own", **where), 1.0,
                             lr=start.LOW, seeds=(1, 2))
            leads.append(f"{fmean(pair[0]) - fmean(pair[1]):.3f}")
    said = ("`diff` is better in longer runs and in a larger model, too: {} better than softmax "
            "after 2,000 steps, and {} with 2.7 M parameters. Softmax with a norm is {} and {} "
            "better (two seeds each)")
    assert said.format(*leads) in words_of("start-record.md")


@pytest.mark.parametrize("steps, said", [
    (500, "Of 500 steps {} runs were made on both. On the CPU their losses are {} lower."),
    (2000, "Of 2,000 steps there are {}, and the machines agree ({})."),
])
def test_runs_that_were_made_on_two_machines(steps, said):
    def key(run):
        return compare.cell_of(run), run["std"], run["lr"], run["seed"]

    on_gpu = {key(run): run["val_loss"] for run in RUNS if run["at"] == "H200"}
    gaps = [on_gpu[key(run)] - run["val_loss"] for run in RUNS
            if run["at"] == "CPU" and run["steps"] == steps and key(run) in on_gpu]
    gap = stats.plus_minus(*stats.mean_interval(gaps))
    assert said.format(len(gaps), gap) in words_of("start-record.md")


def test_the_size_of_what_attention_adds():
    """In percent, of the first layer before the first step, at both stds."""
    percent = {(look["row"], look["std"]): 100 * look["shares"][0] for look in LOOKS
               if look["step"] == 0}
    plain = [percent["softmax", std] for std in start.TWO_STARTS]
    norm = [percent["softmax with a norm", std] for std in start.TWO_STARTS]
    page = words_of("start.md")
    assert f"adds {plain[0]:.0f} % of the size of the residual stream" in page
    assert (f"with a norm it adds {norm[0]:.0f} % (at std 1, {plain[1]:.0f} % and "
            f"{norm[1]:.0f} %)") in page
    assert f"by arithmetic, to {0.2 * norm[0]:.0f} % and {0.2 * norm[1]:.0f} %" in page


ONE_MAP = "diff without its second map"
CONSTANT = "diff with λ_init 0.8"
ONE_CONSTANT_MAP = "diff with λ_init 0.8, without its second map"


@pytest.mark.parametrize("page, said, a, b, where", [
    ("text.md", "`diff` with λ_init 0.8 {} worse", CONSTANT, "softmax", dict(head="tied")),
    ("text.md", "its second map {}", ONE_CONSTANT_MAP, "softmax", dict(head="tied")),
    ("text.md", "`diff` is {} worse", "diff", "softmax", dict(head="tied")),
    ("text.md", "a norm {} worse", "softmax with a norm", "softmax", dict(head="tied")),
    ("text.md", "the gate {} worse", "gate", "softmax", dict(head="tied")),
    ("start.md", "at std 1, {}.**", ONE_MAP, "diff", dict(std=1.0, **LONGER)),
    ("predictions.md", "missed as a mean: {}", "diff", "softmax with a norm", dict(std=1.0)),
    ("predictions.md", "as a mean, {}", "diff without its norm", "softmax with half the heads",
     dict(std=1.0)),
    ("predictions.md", "held: {} ahead", "softmax", CONSTANT, {}),
    ("predictions.md", "false: {}", "diff", "softmax", dict(std=0.2)),
    ("predictions.md", "false at 1, {}", "softmax with a norm and the factor 0.2",
     ONE_CONSTANT_MAP, dict(std=1.0)),
])
def test_a_difference_that_stands_in_a_sentence(page, said, a, b, where):
    assert said.format(less(a, b, **where)) in words_of(page)


def test_the_best_start():
    gains = []
    for row in ("softmax", "diff"):
        at_best = RESULTS.losses(Cell(row, "own"), 0.2)
        for std in start.TWO_STARTS:
            losses = RESULTS.losses(Cell(row, "own"), std)
            gains.append(stats.plus_minus(*stats.difference(losses, at_best)))
    said = ("Softmax is {} better there than at 0.05, and {} better than at 1, and `diff` is {} and "
            "{} better")
    assert said.format(*gains) in words_of("start.md")


def test_the_gain_at_a_low_rate_and_std_0_2():
    gains = []
    for row in ("softmax with a norm", "diff"):
        pair = RESULTS.pair(Cell("softmax", "own"), Cell(row, "own"), 0.2, lr=start.LOW,
                            seeds=(1, 2))
        gains.append(f"{fmean(pair[0]) - fmean(pair[1]):.3f}")
    assert "brings about half of it, {} of {}".format(*gains) in words_of("start.md")


def test_other_seeds_that_choose_the_rate():
    pair = RESULTS.pair(Cell("diff", "own"), Cell("softmax", "own"), AS_DRAWN, lr=2e-3,
                     seeds=start.FEW)
    difference = stats.plus_minus(*stats.difference(*pair))
    assert f"`diff` is {difference} worse than softmax (n = 5)" in words_of("start.md")


def test_the_tables_of_own_runs_hold_these_alone(monkeypatch, capsys):
    monkeypatch.setattr(toys, "train_one", lambda cell, std, rate, seed: seed + len(cell.row))
    toys.OUT.mkdir(parents=True)
    for row in ("diff", "softmax"):
        runs = Runs(Cell(row, "own"), "cpu", at_once=1)
        runs.make("rate", [(1.0, 1e-3, 1)])
        runs.make("reported", [(1.0, 1e-3, seed) for seed in start.FEW])
    start.main(["tables"])
    lines = [line for line in capsys.readouterr().out.splitlines() if " ± " in line]
    assert [line.split(" | ")[0] for line in lines] == ["| each its own", "| diff", "| std 1"]
    assert lines[0].endswith(" | 5 |")


def test_without_runs_there_are_no_tables():
    with pytest.raises(SystemExit, match="there are no runs below"):
        start.main(["tables"])
