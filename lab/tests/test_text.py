"""lab/text.py: the tables of own runs, and that text.md and linear.md say what text.json says."""
import json
import statistics

import pytest

from lab import compare, stats, text, toys
from lab.compare import Results
from lab.tests.pages import has_part, words_of
from lab.toys import AS_DRAWN, Cell

_, RUNS = stats.read_json(compare.TEXT_JSON)
RESULTS = Results(RUNS)


def test_the_pages_have_the_tables_of_the_data():
    for page, parts in text.parts_of(RESULTS).items():
        assert all(has_part(page, part) for part in parts.values())


def test_the_tables_of_own_runs(capsys):
    def lines_of(row, losses, **where):
        cell = vars(Cell(row, "tied", **where))
        return [json.dumps(cell | dict(std=AS_DRAWN, lr=2e-3, seed=seed, purpose="reported",
                                       val_loss=loss, at="CPU"))
                for seed, loss in zip(text.FEW, losses)]

    toys.OUT.mkdir(parents=True)
    lines = lines_of("diff", [3, 4, 5, 6, 7]) + lines_of("diff", [9] * 5, steps=2000)
    (toys.OUT / "diff.jsonl").write_text("\n".join(lines), encoding="utf-8")
    text.main(["tables"])
    assert capsys.readouterr().out == ""  # nothing to compare with
    lines = lines_of("softmax", [2, 4, 5, 6, 7])
    (toys.OUT / "softmax.jsonl").write_text("\n".join(lines), encoding="utf-8")
    text.main(["tables"])
    printed = capsys.readouterr().out
    assert "| diff − softmax | 0.200 ± 2.585 | 5 |" in printed and "Of 1 differences 0" in printed


def less(row, base, **where):
    pair = RESULTS.pair(*(Cell(name, "tied", **where) for name in (row, base)), AS_DRAWN,
                     seeds=text.FEW)
    return stats.plus_minus(*stats.difference(*pair))


def tried(row, rate):
    """The mean loss of the runs on the addresses that chose a rate."""
    return statistics.fmean(run["val_loss"] for run in RUNS if run["row"] == row
                            and (run["text"], run["lr"], run["purpose"])
                            == ("addresses", rate, "rate"))


SHORT = "softmax with half the heads and a norm"


@pytest.mark.parametrize("page, said", [
    ("text.md", f"than we can see, {less('diff with its norm from 0.2', 'diff without its norm')}"),
    ("text.md", f"`diff` is {less('diff', 'diff with its norm from 0.2')} better"),
    ("text.md", f"gains {less(SHORT, 'diff without its second map')}"),
    ("text.md", f"`diff_v2` was {tried('softmax', 1e-3) - tried('diff_v2', 2e-3):.3f} better"),
    ("linear.md", f"it is {less('linear with one head of span 4', 'linear with decay')} worse"),
])
def test_a_number_that_stands_in_a_sentence(page, said):
    assert said in words_of(page)


def test_runs_that_were_made_again():
    gaps = {}
    for run in RUNS:
        if run["purpose"] == "again":
            cell = Cell(run["row"], "tied")
            (loss,) = RESULTS.losses(cell, AS_DRAWN, seeds=[run["seed"]])
            gaps[run["row"]] = run["val_loss"] - loss
    assert abs(gaps["diff_v2"]) < 1e-6
    assert f"softmax is {gaps['softmax']:.4f} off" in words_of("text.md")


@pytest.mark.parametrize("row, said", [
    ("diff_linear", "It ends at {}, {}, {} and {} (means of five runs), once as a plus"),
    ("diff_linear with decay", "With decay it ends at {}, {}, {} and {}."),
])
def test_lambda_at_the_end_of_runs(row, said):
    lambdas = [run["lambda"] for run in RUNS if run["row"] == row and run["purpose"] == "lambda"]
    means = [f"{statistics.fmean(layer):.2f}" for layer in zip(*lambdas)]
    assert said.format(*means) in words_of("linear.md")
