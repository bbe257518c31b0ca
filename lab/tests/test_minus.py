"""lab/minus.py: what a lead is worth, and that minus.md says what its data say."""
import json

import numpy as np
import pytest

from lab import compare, minus, stats, toys
from lab.compare import Results
from lab.tests.pages import has_table, words_of


RUNS = stats.read_json(compare.TOYS_JSON)[1]
RESULTS = Results(RUNS)
OLDER = Results(stats.read_json(compare.TEXT_JSON)[1])


def test_a_lead_is_worth_the_steps_that_softmax_needs_for_it():
    def loss(steps):
        return 3 - 0.5 * np.log(steps) + 0.02 * np.log(steps) ** 2

    losses = {steps: loss(steps) for steps in (50, 200, 800)}
    assert minus.steps_with_loss(losses, loss(300)) == pytest.approx(300)


def test_the_page_has_the_tables_of_the_data():
    for table in minus.parts_of(RESULTS, OLDER).values():
        assert has_table("minus.md", table)


def test_numbers_that_stand_in_sentences():
    contrasts = [*minus.SIGN, ("two gated maps", "diff_v2")]
    *sign, two_gates = (line["val loss"].strip("*")
                        for line in minus.differences(RESULTS, contrasts))
    assert f"A₂, are {two_gates} worse than `diff_v2`" in words_of("minus.md")
    assert f"both false: {sign[2]}, {two_gates}" in words_of("predictions.md")
    assert f"false: {sign[3]}" in words_of("predictions.md")


def test_at_another_rate_the_gain_after_8_000_steps_is_the_same():
    losses = {}
    for row in ("softmax", "diff_v2"):
        cell = toys.Cell(row, "tied", "stdlib", 8000)
        for lr in (2e-3, 4e-3):
            found = RESULTS.losses(cell, toys.AS_DRAWN, lr=lr, seeds=toys.THREE_SEEDS)
            losses[row, lr] = np.mean(found)
        assert losses[row, 4e-3] < losses[row, 2e-3]
    gain = losses["softmax", 4e-3] - losses["diff_v2", 4e-3]
    assert f"and the gain is {gain:.3f} as well" in words_of("minus.md")


def test_the_tables_of_own_runs(capsys):
    toys.OUT.mkdir(parents=True)
    for head, n in ("own", 0), ("tied", 3):
        lines = [json.dumps(run) for run in RUNS if run["head"] == head]
        (toys.OUT / "runs.jsonl").write_text("\n".join(lines), encoding="utf-8")
        minus.main(["tables"])
        assert capsys.readouterr().out.count("\n| --- ") == n
