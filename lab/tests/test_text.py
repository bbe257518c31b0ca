"""lab/text.py: the tables of own runs, and that text.md and linear.md say what text.json says."""
import json
import statistics

import pytest

from lab import stats, text, toys
from lab.toys import Cell

_, RUNS = stats.read_json(stats.RESULTS / "text.json")
PAGES = {page: (stats.RESULTS / page).read_text(encoding="utf-8").replace("−", "-")
         for page in ("text.md", "linear.md", "predictions.md")}


def test_the_pages_have_the_tables_of_the_data():
    for page, parts in text.parts_of(RUNS).items():
        assert all(part.replace("−", "-") in PAGES[page] for part in parts.values())


def test_the_tables_of_own_runs(capsys):
    def run(row, loss, seed, **where):
        return vars(Cell(row, "tied", **where)) | dict(
            std=0.05, lr=2e-3, seed=seed, purpose="reported", val_loss=loss)

    runs = [run("diff", seed, seed) for seed in text.FEW]
    runs += [run("softmax", seed - 0.5, seed) for seed in text.FEW]
    longer = [run("softmax", 9, seed, text="stdlib", steps=2000) for seed in text.FEW]
    toys.OUT.mkdir(parents=True)
    for name, lines in ("longer", longer), ("runs", runs + longer):
        file = toys.OUT / f"{name}.jsonl"
        file.write_text("".join(json.dumps(run) + "\n" for run in lines), encoding="utf-8")
        if name == "longer":
            with pytest.raises(SystemExit, match="no run below .* is of these pages"):
                text.main(["tables"])
    text.main(["tables"])
    printed = capsys.readouterr().out
    assert "| diff | softmax | 0.500 ± 2.306 | 5 |" in printed
    assert "Of 1 differences 0 exclude 0" in printed


def less(row, base, seeds=text.FEW):
    pair = text.losses_of(RUNS, row, seeds), text.losses_of(RUNS, base, seeds)
    return stats.plus_minus(*stats.difference(*pair))


def tried(row, rate):
    return statistics.fmean(run["val_loss"] for run in RUNS if run["row"] == row
                            and run["lr"] == rate and run["purpose"] == "rate")


SHORT = "softmax with half the heads and a norm"


@pytest.mark.parametrize("page, said", [
    ("text.md", "`diff_v2` is "
     + less("softmax, addresses", "diff_v2, addresses", text.ADDRESSES) + " better"),
    ("text.md", "the gate "
     + less("softmax, addresses", "gate, addresses", text.ADDRESSES) + " (n = 3)"),
    ("text.md", f"than we can see, {less('diff, norm from 0.2', 'diff without its norm')}"),
    ("text.md", f"`diff` is {less('diff', 'diff, norm from 0.2')} better"),
    ("text.md", f"gains {less(SHORT, 'diff without its second map')}"),
    ("text.md", "`diff_v2` was "
     f"{tried('softmax, addresses', 1e-3) - tried('diff_v2, addresses', 2e-3):.3f} better"),
    ("linear.md", f"it is {less('linear, one head of span 4', 'linear + decay')} worse"),
])
def test_a_number_that_stands_in_a_sentence(page, said):
    assert said in " ".join(PAGES[page].split())


def test_runs_that_were_made_again():
    again = {run["row"]: run["val_loss"] - text.losses_of(RUNS, run["row"], [run["seed"]])[0]
             for run in RUNS if run["purpose"] == "again"}
    assert abs(again["diff_v2"]) < 1e-6
    assert f"softmax is {again['softmax']:.4f} off" in " ".join(PAGES["text.md"].split())


@pytest.mark.parametrize("row, said", [
    ("diff_linear", "By layer it ends at {}, {}, {} and {} (means of five runs), once as a plus"),
    ("diff_linear + decay", "With decay λ is large, {}, {}, {} and {},"),
])
def test_lambda_at_the_end_of_runs(row, said):
    lambdas = [run["lambda"] for run in RUNS if run["row"] == row and run["purpose"] == "lambda"]
    means = [f"{statistics.fmean(layer):.2f}" for layer in zip(*lambdas)]
    assert said.format(*means) in " ".join(PAGES["linear.md"].split())
