"""The runs of lab/start.py: at once or alone they are the same, and the page says its data."""
import json
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch

import train
from data import load_manual
from lab import matches, start, start_page, stats
from lab.many import Together
from lab.start import ROWS, Cell, Runs, Untied
from model import GPT

torch.set_num_threads(1)


@pytest.fixture
def tiny(monkeypatch):
    """All cells have 1 small layer, and 8 steps."""
    size = dict(n_layer=1, n_embd=32, block_size=32, total_batch=128, batch_size=4)
    monkeypatch.setitem(train.PRESETS, "toy", replace(train.PRESETS["toy"], **size))
    usual = Cell.config
    monkeypatch.setattr(Cell, "config", lambda cell, *kernel: replace(
        usual(cell, *kernel), steps=8, warmup=2, eval_tokens=512))
    start.OUT.mkdir(parents=True)


@pytest.mark.parametrize("row, head", [
    ("softmax, norm", "own"), ("diff", "tied"), ("average", "tied"), ("two gates", "own"),
])
def test_models_that_are_trained_at_once_end_as_if_alone(row, head, tiny):
    cell = Cell(row, head)
    std = 1.0 if head == "own" else None
    wanted = [(std, 2e-3, 1), (std, 8e-3, 2), (std, 8e-3, 1)]
    alone = [start.train_one(cell, *run) for run in wanted]
    assert len({round(loss, 3) for loss in alone}) == 3
    runs = Runs(cell, "cpu", at_once=2)  # two groups, of which the second has a copy
    runs.make(wanted)
    assert [runs.losses[run] for run in wanted] == pytest.approx(alone, abs=2e-5)


def test_the_limit_of_a_gradient_and_the_decay_are_each_models_own(tiny):
    cell = Cell("softmax", "tied")
    config = replace(cell.config("map"), grad_clip=1e-3, weight_decay=10.0)
    models = [cell.model(None, seed, "map") for seed in (1, 2)]
    _, params = Together(models[0]).train(models, [1e-3, 1e-2], [1, 2], config, *load_manual())
    for model_params, rate, seed in zip(params, (1e-3, 1e-2), (1, 2)):
        one = replace(config, kernel="sdpa", lr=rate, seed=seed, device="cpu")
        model = GPT(one, seed)
        optimizer = train.make_optimizer(model, one)
        for step in range(config.steps):
            train.training_step(model, optimizer, load_manual()[0], one, step)
        first = model.wte.weight.flatten()
        torch.testing.assert_close(model_params[: len(first)], first, rtol=1e-4, atol=1e-6)


def test_an_output_layer_of_its_own_begins_as_the_embedding_does():
    cell = Cell("diff", "own")
    usual, large = cell.model(None, seed=5), cell.model(1.0, seed=5)
    tied = GPT(cell.config(), 5)
    for name, p in tied.state_dict().items():
        assert torch.equal(usual.state_dict()[name], p)
    stds = [w.std().item() for w in (usual.wte.weight, usual.head_proj.weight, large.wte.weight)]
    assert stds == pytest.approx([0.051, 0.051, 1.0], rel=0.02)
    assert torch.equal(large.head_proj.weight, usual.head_proj.weight)
    idx = torch.arange(20)[None]
    with torch.no_grad():
        usual.head_proj.weight.copy_(usual.wte.weight)
    for found, expected in zip(usual(idx, idx), tied(idx, idx)):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("row", ROWS)
def test_all_rows_are_equally_large(row):
    sizes = [sum(p.numel() for p in Cell(name, "own").model(None, 1).parameters())
             for name in (row, "softmax")]
    limit = 0.1 if row == "softmax, V2's MLP" else 0.002
    assert sizes[0] == pytest.approx(sizes[1], rel=limit)


def test_a_rate_is_chosen_inside_of_the_grid_and_no_run_is_made_twice(tiny, monkeypatch):
    made = []

    def loss(cell, std, rate, seed):
        made.append((std, rate, seed))
        return abs(np.log2(rate / 1.6e-2)) + seed / 10

    monkeypatch.setattr(start, "train_one", loss)
    assert Runs(Cell("diff", "own"), "cpu", 1).best_rate(1.0) == pytest.approx(1.6e-2)
    assert max(rate for _, rate, _ in made) == pytest.approx(3.2e-2)  # one more
    assert len(made) == len(set(made)) == 14
    assert Runs(Cell("diff", "own"), "cpu", 1).best_rate(1.0) == pytest.approx(1.6e-2)
    assert len(made) == 14  # they are in the file


def test_a_piece_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        start.main(["--pieces=start: cosine"])
    assert "there is no piece 'start: cosine'" in capsys.readouterr().err


def test_on_a_cpu_larger_models_are_trained_one_by_one(monkeypatch):
    made = []
    monkeypatch.setattr(start, "train_one", lambda *run: made.append(run) or abs(run[2] - 2e-3))
    start.OUT.mkdir(parents=True)
    start.main(["--pieces=size: diff", "--device=cpu", "--at_once=1"])
    assert len(made) == 2 * (2 * 6 + 12)  # two starts: six rates on two seeds, and twelve others


def test_new_runs_join_the_published_ones(tiny):
    old = vars(Cell("diff", "own")) | dict(std=1.0, lr=1e-3, seed=1, val_loss=2.0, at="CPU")
    with pytest.raises(SystemExit, match="there are no runs below"):
        start_page.collect([old])
    new = [old | dict(val_loss=1.9), old | dict(seed=2)]
    text = "".join(json.dumps(run) + "\n" for run in new)
    (start.OUT / "a.jsonl").write_text(text, encoding="utf-8")
    others = [old | dict(seed=3), old | dict(at="H200")]
    assert start_page.collect([old, *others]) == [new[0], *others, new[1]]


def test_two_rows_are_compared_on_one_machine_if_they_can_be():
    a = {"H200": [1.0] * 9, "CPU": [2.0] * 4}
    assert start_page.pair_of(a, {"CPU": [3.0] * 5}) == ([2.0] * 4, [3.0] * 5, True)
    assert start_page.pair_of(a, a) == ([1.0] * 9, [1.0] * 9, True)
    assert start_page.pair_of({"H200": [1.0]}, {"CPU": [3.0]}) == ([1.0], [3.0], False)


def test_a_diverged_run_is_inf(tiny):
    runs = Runs(Cell("softmax", "tied"), "cpu", at_once=2)
    runs.make([(None, 1e30, 1), (None, 1e-3, 1)])
    assert runs.losses[None, 1e30, 1] == np.inf and runs.losses[None, 1e-3, 1] < 6
    line = json.loads(runs.file.read_text().splitlines()[0])
    assert line["val_loss"] == np.inf
    assert line["at"] == "CPU" and line["commit"] == start.commit()


def words_of(page):
    return " ".join((stats.RESULTS / page).read_text(encoding="utf-8").split()).replace("−", "-")


def stands_on(table, page):
    """Does the page have this table? A table is written with the minus of prose."""
    return " ".join(stats.markdown(table).split()).replace("−", "-") in words_of(page)


def test_the_pages_say_their_data():
    about, runs = stats.read_json(stats.RESULTS / "start.json")
    data = start_page.Data(runs)
    for part in start_page.parts_of(data).values():
        assert " ".join(part.split()).replace("−", "-") in words_of("start.md")
    assert stands_on(matches.table_of_signs(), "minus.md")

    def reported(rows, std=None, head="tied"):
        return [data.reported(Cell(row, head), std)[1] for row in rows]

    def less(*args):
        a, b, on_one_machine = start_page.pair_of(*reported(*args))
        assert on_one_machine
        return stats.plus_minus(*stats.difference(a, b))

    low = [data.at(Cell(row, "own"), 1.0, 5e-4)["H200"] for row in ("diff", "softmax")]
    cost = fmean(low[1]) - fmean(reported(["softmax"], 1.0, "own")[0]["H200"])
    on_cpu = [run for run in runs if run["row"] == "softmax" and run["head"] == "own"
              and run["steps"] == 500 and run["at"] == "CPU"]
    losses = {(run["std"], run["seed"]): run["val_loss"] for run in runs if run["lr"] == 4e-3
              and run["row"] == "softmax" and run["head"] == "own" and run["at"] == "H200"}
    machine = [losses[run["std"], run["seed"]] - run["val_loss"] for run in on_cpu]
    assert len(machine) == 10
    longer = [data.reported(Cell(row, "own", "stdlib", 2000), 1.0)[1]["CPU"]
              for row in ("diff", "softmax")]
    words = words_of("start.md")
    for number in [
        f"At 0.0005 softmax is {cost:.2f} worse than at its own rate",
        f"softmax is {less(['diff', 'softmax, norm'], 1.0, 'own')} ahead of `diff`",
        f"`diff` is {less(['softmax', 'diff, no norm'], None, 'own')} ahead of softmax",
        f"held: {stats.plus_minus(*stats.difference(*low))}",
        f"it is {stats.plus_minus(*stats.difference(*longer))} behind",
        f"({less(['softmax', 'diff, λ_init 0.8'], None, 'own')} ahead)",
        f"is {less(['softmax', '2 heads, norm, factor 0.2'], None, 'own')} ahead. So",
        f"runs are {stats.plus_minus(*stats.mean_interval(machine))} lower there",
    ]:
        assert number in words, number
    words = words_of("minus.md")
    for number in [
        f"`diff_v2` is {less(['softmax', 'diff_v2'])} ahead of softmax",
        f"it is {less(['diff_v2, plus', 'diff_v2'])} worse than with the minus",
        f"no better than softmax ({less(['diff_v2, plus', 'softmax'])} behind)",
        f"Two gated maps are {less(['two gates', 'diff_v2'])} behind `diff_v2`",
    ]:
        assert number in words, number


def test_the_page_says_where_the_lead_lies():
    found = json.loads((stats.RESULTS / "matches.json").read_text())
    assert stands_on(matches.table_of(found), "minus.md")
    n_bytes = np.sum(found["counts"])
    leads = {name: np.sum(lead, axis=(1, 2)) / n_bytes for name, lead in found["leads"].items()}
    less = stats.mean_interval(list(leads["diff_v2"] - leads["longer"]))
    assert f"lower by {stats.plus_minus(*less)}" in words_of("minus.md")
