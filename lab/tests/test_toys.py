"""The toys: trained at once or alone they are the same, and their plan is what was published."""
import math
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

import train
from data import hash_of, load_manual
from lab import toys
from lab.stats import RESULTS, read_runs
from lab.toys import AS_DRAWN, ROWS, Cell, Runs
from model import GPT, Refused

torch.set_num_threads(1)


@pytest.fixture
def tiny(monkeypatch):
    """All cells have 1 small layer, and 8 steps."""
    size = dict(n_layer=1, n_embd=32, block_size=32, total_batch=128, batch_size=4)
    monkeypatch.setitem(train.PRESETS, "toy", replace(train.PRESETS["toy"], **size))
    usual = Cell.config
    monkeypatch.setattr(Cell, "config", lambda cell: replace(
        usual(cell), steps=8, warmup=2, eval_tokens=512))
    toys.OUT.mkdir(parents=True)


@pytest.mark.parametrize("row, head", [
    ("softmax with a norm", "own"), ("diff", "tied"), ("two gated maps", "own"),
])
def test_toys_that_are_trained_at_once_end_as_if_alone(row, head, tiny):
    cell = Cell(row, head)
    std = 1.0 if head == "own" else AS_DRAWN
    wanted = [(std, 2e-3, 1), (std, 8e-3, 2), (std, 8e-3, 1)]
    alone = Runs(cell, "cpu", at_once=1)
    alone.make("rate", wanted)
    losses = list(alone.losses.values())
    assert len({round(loss, 3) for loss in losses}) == 3
    at_once = Runs(cell, "cpu", at_once=4).train_group(wanted)  # and a copy of the last one
    assert at_once == pytest.approx(losses, abs=2e-5)


def test_an_output_layer_of_its_own_begins_as_the_embedding_does():
    cell = Cell("diff", "own")
    usual, large = cell.model(AS_DRAWN, seed=5), cell.model(1.0, seed=5)
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
    sizes = [sum(p.numel() for p in Cell(name, "own").model(AS_DRAWN, 1).parameters())
             for name in (row, "softmax")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.002)


def test_a_rate_is_chosen_inside_of_the_grid_and_no_run_is_made_twice(tiny, monkeypatch):
    made = []

    def loss(cell, std, rate, seed):
        made.append((std, rate, seed))
        return abs(np.log2(rate / 1.6e-2)) + seed / 10

    monkeypatch.setattr(toys, "train_one", loss)
    assert Runs(Cell("diff", "own"), "cpu", 1).best_rate(1.0) == pytest.approx(1.6e-2)
    assert max(rate for _, rate, _ in made) == pytest.approx(3.2e-2)  # one more
    assert len(made) == len(set(made)) == 14
    assert Runs(Cell("diff", "own"), "cpu", 1).best_rate(1.0) == pytest.approx(1.6e-2)
    assert len(made) == 14  # they are in the file


def test_a_diverged_run_is_inf(tiny):
    runs = Runs(Cell("softmax", "tied"), "cpu", at_once=1)
    runs.make("rate", [(AS_DRAWN, 1e30, 1), (AS_DRAWN, 1e-3, 1)])
    assert runs.losses[AS_DRAWN, 1e30, 1] == np.inf and runs.losses[AS_DRAWN, 1e-3, 1] < 6
    line = read_runs(runs.file)[0]
    assert line["val_loss"] == np.inf and line["purpose"] == "rate"
    assert line["at"] == "CPU" and line["commit"] == toys.commit()
    assert line["data_hash"] == hash_of(*load_manual())


def test_runs_of_another_text_are_made_again(tiny, monkeypatch):
    monkeypatch.setattr(toys, "train_one", lambda *run: 1.0)
    for data_hash in ("a", "b"):
        monkeypatch.setattr(toys, "text_hash", lambda name, text=data_hash: text)
        runs = Runs(Cell("diff", "own"), "cpu", 1)
        assert runs.losses == {}
        runs.make("rate", [(1.0, 1e-3, 1)])
    assert len(runs.file.read_text().splitlines()) == 2


def test_a_half_line_is_named_with_its_file(tiny):
    runs = Runs(Cell("diff", "own"), "cpu", 1)
    runs.file.write_text('{"row": "di')
    with pytest.raises(Refused, match="diff-own-manual-500-0.8_M.jsonl has no run in line 1"):
        Runs(Cell("diff", "own"), "cpu", 1)


def test_a_piece_that_is_not_there_is_refused():
    with pytest.raises(Refused, match="there is no piece 'start: cosine'"):
        toys.main(["--only=start: cosine"])


def test_val_of_the_library_is_spread_and_has_no_long_line_of_train():
    shared, own = b"a line that both of the texts have", b"a line that only val has in it"
    short = b"x"
    kept = toys.without_lines_of([shared + b"\n" + short], [b"\n".join((shared, own, short))])
    assert kept == [own + b"\n" + short]
    tokens = np.arange(100)
    spread = [*range(10), *range(30, 40), *range(60, 70), *range(90, 100)]
    assert toys.spread(tokens, 30, piece=10).tolist() == spread


# ---- the plan

def test_the_planned_runs_are_the_published_ones(monkeypatch):
    """With the published losses in place of training the same rates are chosen."""
    published, reported = {}, set()
    for name in ("text.json", "toys.json"):
        for run in read_runs(RESULTS / name):
            if run["text"] == "addresses":  # these were trained by train.py
                continue
            cell = Cell(**{field.name: run[field.name] for field in fields(Cell)})
            key = cell, run["std"], run["lr"], run["seed"]
            published[key] = run["val_loss"]
            if run["purpose"] == "reported":
                reported.add(key)
    planned = set()

    def look_up(*run):
        planned.add(run)
        return published.get(run, math.inf)

    monkeypatch.setattr(toys, "train_one", look_up)
    groups = {name.partition(":")[0] for name in toys.pieces()}
    published_groups = [name for name in groups if not name.startswith(("library", "controls"))]
    toys.main(["--device=cpu", f"--only={';'.join(published_groups)}"])
    unplanned = Counter((cell.row, lr) for cell, _, lr, _ in reported - planned)
    assert unplanned == {("diff_v2", 2e-3): 40}  # of text.json. Those of toys.json have 4e-3
    missing = Counter((cell.row, std) for cell, std, _, _ in planned - published.keys())
    at_1e_3 = ("softmax", "softmax with decay", "linear with decay",
               "linear with one head of span 4")
    assert missing == {("diff without its second map", 0.2): 12,  # rates and seeds
                       **{(row, AS_DRAWN): 2 for row in at_1e_3}}
