"""lab/minus.py: what a lead is worth, and that minus.md says what its data say."""
import json

import numpy as np
import pytest

from lab import minus, stats, toys
from lab.toys import Results

RUNS = stats.read_json(toys.TOYS_JSON)[1]
RESULTS = Results(RUNS)
OLDER = Results(stats.read_json(minus.TEXT_JSON)[1])


def words_of(page):
    return " ".join((stats.RESULTS / page).read_text(encoding="utf-8").split()).replace("−", "-")


def test_a_lead_is_worth_the_steps_that_softmax_needs_for_it():
    def loss(steps):
        return 3 - 0.5 * np.log(steps) + 0.02 * np.log(steps) ** 2

    losses = {steps: loss(steps) for steps in (50, 200, 800)}
    assert minus.steps_with_loss(losses, loss(300)) == pytest.approx(300)


def test_the_page_has_the_tables_of_the_data():
    for table in minus.parts_of(RESULTS, OLDER).values():
        text = stats.markdown(table).replace("−", "-")
        assert " ".join(text.split()) in words_of("minus.md")


def test_numbers_that_stand_in_sentences():
    contrasts = [*minus.SIGN, ("two gated maps", "diff_v2")]
    *sign, two_gates = (line["val loss"].strip("*")
                        for line in minus.differences(RESULTS, contrasts))
    assert f"A₂, are {two_gates} worse than `diff_v2`" in words_of("minus.md")
    assert f"both false: {sign[2]}, {two_gates}" in words_of("predictions.md")
    assert f"false: {sign[3]}" in words_of("predictions.md")


def test_the_tables_of_own_runs(capsys):
    toys.OUT.mkdir(parents=True)
    for head, n in ("own", 0), ("tied", 3):
        lines = [json.dumps(run) for run in RUNS if run["head"] == head]
        (toys.OUT / "runs.jsonl").write_text("\n".join(lines), encoding="utf-8")
        minus.main(["tables"])
        assert capsys.readouterr().out.count("\n| --- ") == n
