"""lab/text.py: its rows, a small experiment with two of them, and the page's numbers."""
import statistics

import torch

import train
from lab import stats, text
from model import ATTENTION, Attention

torch.set_num_threads(1)


def test_each_row_can_be_trained_and_is_compared():
    for row, flags in text.ROWS.items():
        (config,) = train.parse([*text.FLAGS.split(), *flags.split()])
        assert config.attn in ATTENTION
        assert text.reported_seeds(row) and not set(text.CHOOSE_ON) & set(text.reported_seeds(row))


def test_a_small_experiment_from_the_first_run_to_the_page(monkeypatch, capsys):
    tiny = "--preset=toy --device=cpu --n_layer=1 --n_embd=16 --block_size=16 --total_batch=32"
    monkeypatch.setattr(text, "FLAGS", f"{tiny} --steps=2 --eval_tokens=64")
    monkeypatch.setattr(text, "ROWS", {row: f"--attn={row}" for row in ("diff_linear", "gate")})
    monkeypatch.setattr(text, "LINEAR", ["diff_linear"])
    comparisons = [("gate", "diff_linear", range(3, 5))]
    monkeypatch.setattr(text, "COMPARISONS", {("text.md", "answer"): comparisons})
    monkeypatch.setattr(text, "ALL", comparisons)
    monkeypatch.setattr(train, "evaluate", lambda model, val, config, *_: abs(config.lr - 4e-3))
    # the map is for pictures: no run of this size should need it
    monkeypatch.setattr(Attention, "map", None)
    text.main(["run"])
    _, runs = stats.read_json("out/text/text.json")
    printed = capsys.readouterr().out
    assert "| gate | diff_linear | 0.000 ± 0.000 | 2 |" in printed
    assert "| diff_linear | 0." in printed.split("| λ |")[1]
    made = [(run["row"], run["lr"], run["seed"]) for run in runs if run["purpose"] == "reported"]
    assert made == [(row, 4e-3, seed) for row in ("diff_linear", "gate") for seed in (3, 4)]


def test_the_page_has_the_table_and_the_numbers_of_its_json():
    pages = {page: (stats.RESULTS / page).read_text(encoding="utf-8").replace("−", "-")
             for page in ("text.md", "linear.md", "predictions.md")}
    _, runs = stats.read_json(stats.RESULTS / "text.json")
    for page, parts in text.parts_of(runs).items():
        assert all(part.replace("−", "-") in pages[page] for part in parts.values())
    words = " ".join(" ".join(pages.values()).split())

    def less(row, base, seeds=text.FEW):
        pair = text.losses_of(runs, row, seeds), text.losses_of(runs, base, seeds)
        return stats.plus_minus(*stats.difference(*pair))

    def tried(row, rate):
        return statistics.fmean(run["val_loss"] for run in runs if run["row"] == row
                                and run["lr"] == rate and run["purpose"] == "rate")

    again = {r["row"]: r["val_loss"] - text.losses_of(runs, r["row"], [r["seed"]])[0]
             for r in runs if r["purpose"] == "again"}
    assert abs(again["diff_v2"]) < 1e-6
    for number in [
        f"`diff_v2` is {less('softmax, addresses', 'diff_v2, addresses', text.ADDRESSES)} better",
        f"the gate {less('softmax, addresses', 'gate, addresses', text.ADDRESSES)} (n = 3)",
        f"more than we can see, {less('diff, norm from 0.2', 'diff without its norm')}",
        f"`diff` is {less('diff', 'diff, norm from 0.2')} better",
        f"gains {less('softmax with half the heads and a norm', 'diff without its second map')}",
        f"`diff_v2` was {tried('softmax, addresses', 1e-3) - tried('diff_v2, addresses', 2e-3):.3f}",
        f"held as a mean: {less('linear, one head of span 4', 'linear + decay')}",
        f"softmax is {again['softmax']:.4f} off",
    ]:
        assert number in words, number
