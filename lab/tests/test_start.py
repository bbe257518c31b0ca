"""The runs of lab/start.py: at once or alone they are the same, and the page says its data."""
import json
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch

import train
from data import load_manual
from lab import minus, start, start_page, stats
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
    ("softmax with a norm", "own"), ("diff", "tied"), ("softmax minus the average", "tied"),
    ("two gated maps", "own"),
])
def test_models_that_are_trained_at_once_end_as_if_alone(row, head, tiny):
    cell = Cell(row, head)
    std = 1.0 if head == "own" else 0.05
    wanted = [(std, 2e-3, 1), (std, 8e-3, 2), (std, 8e-3, 1)]
    alone = [start.train_one(cell, *run) for run in wanted]
    assert len({round(loss, 3) for loss in alone}) == 3
    runs = Runs(cell, "cpu", at_once=2)  # two groups, of which the second has a copy
    runs.make(wanted)
    assert [runs.losses[run] for run in wanted] == pytest.approx(alone, abs=2e-5)


def test_the_limit_of_a_gradient_and_the_decay_are_each_models_own(tiny):
    cell = Cell("softmax", "tied")
    config = replace(cell.config("map"), grad_clip=1e-3, weight_decay=10.0)
    models = [cell.model(0.05, seed, "map") for seed in (1, 2)]
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
    usual, large = cell.model(0.05, seed=5), cell.model(1.0, seed=5)
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
    sizes = [sum(p.numel() for p in Cell(name, "own").model(0.05, 1).parameters())
             for name in (row, "softmax")]
    limit = 0.1 if row == "softmax with diff_v2's MLP" else 0.002
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
        start.main(["run", "--pieces=start: cosine"])
    assert "there is no piece 'start: cosine'" in capsys.readouterr().err


def test_on_a_cpu_larger_models_are_trained_one_by_one(monkeypatch):
    made = []
    monkeypatch.setattr(start, "train_one", lambda *run: made.append(run) or abs(run[2] - 2e-3))
    start.OUT.mkdir(parents=True)
    start.main(["run", "--pieces=size: diff", "--device=cpu"])
    assert len(made) == 2 * (2 * 6 + 12)  # two starts: six rates on two seeds, and twelve others


def test_new_runs_join_the_published_ones(tiny):
    with pytest.raises(SystemExit, match="there are no runs below"):
        start_page.main(["tables"])
    old = vars(Cell("diff", "own")) | dict(std=1.0, lr=1e-3, seed=1, val_loss=2.0, at="CPU")
    new = [old | dict(val_loss=1.9), old | dict(seed=2)]
    text = "".join(json.dumps(run) + "\n" for run in new)
    (start.OUT / "a.jsonl").write_text(text, encoding="utf-8")
    assert start_page.read_runs() == new
    others = [old | dict(seed=3), old | dict(at="H200")]
    assert start_page.joined([old, *others], new) == [new[0], *others, new[1]]


def test_tables_of_own_runs_hold_these_alone(tiny, capsys):
    for row in ("diff", "softmax"):
        Runs(Cell(row, "own"), "cpu", at_once=6).make(
            [(1.0, 1e-3, seed) for seed in (1, *start.FEW)])
    start_page.main(["tables"])
    lines = [line for line in capsys.readouterr().out.splitlines() if " ± " in line]
    assert [line.split(" | ")[0] for line in lines] == ["| each its own", "| diff", "| std 1"]
    assert lines[0].endswith(" | 5 |")


def test_two_rows_are_compared_on_one_machine():
    def run(row, at, seed, lr=1e-3):
        return vars(Cell(row, "own")) | dict(std=1.0, lr=lr, seed=seed, at=at,
                                             val_loss=seed + 0.5 * (at == "CPU"))

    runs = [run("diff", "H200", seed) for seed in range(1, 9)]
    runs += [run("diff", "CPU", seed) for seed in (1, 3, 4)]
    runs += [run("softmax", "CPU", seed) for seed in (1, 3)]
    cells = Cell("diff", "own"), Cell("softmax", "own")
    assert list(start_page.Data(runs).pair(*cells, 1.0)) == [[3.5, 4.5], [3.5]]
    runs += [run("softmax", "H200", seed) for seed in (1, 3)]
    assert list(start_page.Data(runs).pair(*cells, 1.0)) == [[3, 4, 5, 6, 7, 8], [3]]
    assert list(start_page.Data(runs).pair(*cells, 1.0, 1e-3)) == [[3, 4, 5, 6, 7], [3]]
    assert list(start_page.Data(runs).pair(*cells, 0.05)) == [[], []]


def test_a_diverged_run_is_inf(tiny):
    runs = Runs(Cell("softmax", "tied"), "cpu", at_once=2)
    runs.make([(0.05, 1e30, 1), (0.05, 1e-3, 1)])
    assert runs.losses[0.05, 1e30, 1] == np.inf and runs.losses[0.05, 1e-3, 1] < 6
    line = json.loads(runs.file.read_text().splitlines()[0])
    assert line["val_loss"] == np.inf
    assert line["at"] == "CPU" and line["commit"] == start.commit()


def words_of(page):
    return " ".join((stats.RESULTS / page).read_text(encoding="utf-8").split()).replace("−", "-")


def stands_on(table, page):
    """Does the page have this table? A table is written with the minus of prose."""
    return " ".join(stats.markdown(table).split()).replace("−", "-") in words_of(page)


def test_the_pages_say_their_data():
    _, runs = stats.read_json(stats.RESULTS / "start.json")
    data = start_page.Data(runs)
    for name, part in start_page.parts_of(data).items():
        page = "start-record.md" if name in start_page.ON_RECORD else "start.md"
        assert " ".join(part.split()).replace("−", "-") in words_of(page)

    assert stands_on(minus.table_of(data, minus.SIGNS), "minus.md")
    assert stands_on(minus.table_of_others(data), "minus.md")
    assert stands_on(minus.table_of_lead(data), "minus.md")


def less(data, a, b, std=0.05, head="own", **where):
    """row a − row b, like "0.123 ± 0.004"."""
    pair = data.pair(*(Cell(row, head, **where) for row in (a, b)), std)
    return stats.plus_minus(*stats.difference(*pair))


def test_the_words_of_start_say_its_data():
    about, runs = stats.read_json(stats.RESULTS / "start.json")
    data = start_page.Data(runs)
    low = [data.at(Cell(row, "own"), 1.0, 5e-4, "H200") for row in ("diff", "softmax")]
    cost = fmean(low[1]) - fmean(data.reported(Cell("softmax", "own"), 1.0, "H200")[1])
    def lead_at_low(row, **where):
        """Of a row on softmax, on the two seeds that were run at this rate."""
        found = [data.found["H200", Cell(name, "own", **where), 1.0][5e-4]
                 for name in ("softmax", row)]
        losses = [fmean(losses[seed] for seed in (1, 2)) for losses in found]
        return f"{losses[0] - losses[1]:.3f}"

    # runs that were made on both machines
    def key(run):
        return *(run[name] for name in vars(Cell("", ""))), run["std"], run["lr"], run["seed"]

    there = {key(run): run["val_loss"] for run in runs if run["at"] == "H200"}
    both = {steps: [there[key(run)] - run["val_loss"] for run in runs
                    if run["at"] == "CPU" and key(run) in there and run["steps"] == steps]
            for steps in (500, 2000)}
    lower = {steps: stats.plus_minus(*stats.mean_interval(gaps)) for steps, gaps in both.items()}
    without_it, constant = "diff without its second map", "diff with λ_init 0.8"
    one_constant = f"{constant}, without its second map"
    factor = "softmax with a norm and the factor 0.2"
    no_norm, half = "diff without its norm", "softmax with half the heads"
    long, large = dict(text="stdlib", steps=2000), dict(size="2.7 M")
    tables = start_page.differences(data)
    at_2e_3 = [data.at(Cell(row, "own"), 0.05, 2e-3, "H200") for row in ("diff", "softmax")]
    said = {"start.md": [
        f"corrected for the {start_page.count(tables)} differences",
        f"the lowest one, 0.0005, softmax is {cost:.2f} worse than at its own rate",
        f"after 2,000 steps at std 1, {less(data, without_it, 'diff', 1.0, **long)}",
    ], "start-record.md": [
        f"{lead_at_low('diff', **long)} better than softmax after 2,000 steps, and "
        f"{lead_at_low('diff', **large)} with 2.7 M parameters. Softmax with a norm is "
        f"{lead_at_low('softmax with a norm', **long)} and "
        f"{lead_at_low('softmax with a norm', **large)} better",
        f"Of 500 steps {len(both[500])} runs were made on both. On the CPU their losses are "
        f"{lower[500]} lower",
        f"Of 2,000 steps there are {len(both[2000])}, and the machines agree ({lower[2000]})",
        f"There `diff` is {stats.plus_minus(*stats.difference(*at_2e_3))} worse (n = 5)",
    ], "text.md": [
        f"`diff` with λ_init 0.8 {less(data, constant, 'softmax', head='tied')} worse",
        f"without its second map {less(data, one_constant, 'softmax', head='tied')}",
        f"`diff` is {less(data, 'diff', 'softmax', head='tied')} worse",
        f"softmax with a norm {less(data, 'softmax with a norm', 'softmax', head='tied')} worse",
        f"the gate {less(data, 'gate', 'softmax', head='tied')} worse",
    ], "predictions.md": [
        f"missed as a mean: {less(data, 'diff', 'softmax with a norm', 1.0)}",
        f"missed as a mean, {less(data, no_norm, half, 1.0)}",
        f"held: {stats.plus_minus(*stats.difference(*low))}",
        f"held: {less(data, 'softmax', 'diff with λ_init 0.8')} ahead",
        f"false: {less(data, 'diff', 'softmax', 0.2)}",
        f"{less(data, factor, one_constant)}; false at 1, {less(data, factor, one_constant, 1.0)}",
    ]}
    looks = {(look["row"], look["std"]): 100 * look["shares"][0] for look in about["stream"]
             if look["step"] == 0}
    one, norm = [[looks[row, std] for std in (0.05, 1.0)]
                 for row in ("softmax", "softmax with a norm")]
    said["start.md"] += [
        f"adds {one[0]:.0f} % of the size of the residual stream that it reads, and with a norm it "
        f"adds {norm[0]:.0f} % (at std 1, {one[1]:.0f} % and {norm[1]:.0f} %)",
        f"brings this to {0.2 * norm[0]:.0f} % and {0.2 * norm[1]:.0f} %",
    ]
    for page, numbers in said.items():
        for number in numbers:
            assert number.replace("−", "-") in words_of(page), number


def test_the_words_of_minus_say_its_data():
    data = start_page.Data(stats.read_json(stats.RESULTS / "start.json")[1])
    words = words_of("minus.md") + words_of("predictions.md")
    minus_less_plus = less(data, "diff_v2", "diff_v2 with a plus", head="tied")
    minus_less_smaller = less(data, "diff_v2", "diff_v2 with a smaller plus", head="tied")
    two_gates = less(data, "two gated maps", "diff_v2", head="tied")
    for number in [
        f"σ(b·x)A₂, are {two_gates} worse than `diff_v2`",
        f"both false: {minus_less_plus}, {two_gates}",
        f"false: {minus_less_smaller}",
    ]:
        assert number in words, number


def test_the_page_says_where_the_lead_lies():
    found = json.loads((stats.RESULTS / "matches.json").read_text())
    assert stands_on(minus.table_of_matches(found), "minus.md")
    n_bytes = np.sum(found["counts"])
    leads = {name: np.sum(lead, axis=(1, 2)) / n_bytes for name, lead in found["leads"].items()}
    less = stats.mean_interval(list(leads["diff_v2"] - leads["longer"]))
    assert f"lower by {stats.plus_minus(*less)}" in words_of("minus.md")
