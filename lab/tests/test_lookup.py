"""The look-up: its texts and its model, and that its pages say what its data say."""
import math
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lab import lookup
from lab.lookup import NAMES, percent, shares
from lab.pairs import Reader, Run, make_texts, train
from lab.stats import RESULTS, read_json
from lab.tests.pages import has_part, words_of

torch.set_num_threads(1)
SETTINGS = [field.name for field in fields(Run)]
RUNS = read_json(RESULTS / "lookup.json")[1]
MINUS = ("diff", "softmax_average")


def test_a_text_has_crowds_and_else_different_values():
    texts = make_texts(0, 20, m=16, more=32, crowds=2)
    for key, value in zip(texts.key.tolist(), texts.value.tolist()):
        assert [len(set(part)) for part in (value[:32], value[32:48], value[48:])] == [2, 1, 48]
        assert not set(value[48:]) & set(value[:48]) and not set(key[:32]) & set(key[32:])
    plain = make_texts(0, 20)
    crowd = make_texts(0, 20, m=16)  # the same texts, but for the values of 16 pairs
    assert torch.equal(plain.key, crowd.key)
    assert torch.equal(plain.value[:, 16:], crowd.value[:, 16:])


@torch.no_grad()
def test_logits_have_a_cap_the_order_is_nothing_and_lambda_can_be_held():
    texts = make_texts(0, 3)
    one = Reader(Run("softmax", tau=2.5))
    layer = one.blocks[0].attn
    q, k, _ = layer.project(one.tokens(texts))
    largest = q.norm(dim=-1) * k.norm(dim=-1) / math.sqrt(layer.d)  # if a key points as the query
    torch.testing.assert_close(largest, torch.full_like(largest, 2.5))
    plain = one.weights(texts)
    torch.testing.assert_close(one.weights(texts._replace(rank=-texts.rank)), plain)
    held = one.read_as("softmax_average", lam=1.0)  # the first query sees 64 pairs and itself
    torch.testing.assert_close(held.weights(texts)[:, :, 0], plain[:, :, 0] - 1 / 65)
    assert torch.equal(one.weights(texts), plain) and one.own_lambda() == 0


@torch.no_grad()
def test_a_cap_and_a_held_lambda_belong_to_the_class_of_a_layer():
    reader = Reader(Run("diff", tau=2.5)).read_as("diff", lam=0.7)
    another = type(reader.blocks[0].attn)(reader.config, depth=0)
    x = reader.tokens(make_texts(0, 3))
    q, k, _ = another.project(x)
    assert (q @ k.mT).max() / math.sqrt(another.d) < 2.5001
    assert another.lam(x) == 0.7 and reader.own_lambda() == 0.7


@pytest.mark.parametrize("arm, loss", [("softmax_average", 4.869276), ("diff", 4.870707)])
def test_training_repeats_that_of_the_published_runs(arm, loss):
    """The losses after 80 steps, as at commit 6d48cee."""
    reader = train(Run(arm, 1e-2, seed=3), steps=80)
    texts = make_texts(10**6, 64)
    found = F.cross_entropy(reader(texts).flatten(0, 1), texts.answer().flatten())
    assert found.item() == pytest.approx(loss, abs=2e-5)


def test_the_first_picture(monkeypatch):
    monkeypatch.setattr(lookup, "shown_texts", lambda m: make_texts(0, 4, m=m))
    lookup.show(steps=3)
    files = {path.name for path in Path("out/lookup").iterdir()}
    pictures = {"lookup-front.png", "lookup-weights.png", "lookup.png"}
    assert files == pictures | {"lookup-shown.json"}


def key(run):
    return str({name: run[name] for name in ("row", *SETTINGS)})


def test_the_planned_runs_are_those_of_the_page():
    planned = [dict(row=row) | asdict(run) for row, run in lookup.planned_runs()]
    assert sorted(map(key, planned)) == sorted(map(key, RUNS))


def test_the_runs_of_the_page_are_made_anew_and_not_twice(monkeypatch, capsys):
    results = {key(run): run for run in RUNS}
    made = []
    monkeypatch.setattr(lookup, "train", lambda run: made.append(run) or run)
    planned = iter(lookup.planned_runs())

    def measure(run):
        row, expected = next(planned)
        assert run == expected
        published = results[key(dict(row=row) | asdict(run))]
        return {name: published[name] for name in published.keys() - {"row", *SETTINGS}}

    monkeypatch.setattr(lookup, "measure", measure)
    for _ in range(2):
        lookup.main(["run"])
        assert lookup.crowd_table(RUNS) in capsys.readouterr().out
    assert len(made) == len(RUNS)
    _, runs = read_json("out/lookup/lookup.json")
    assert {key(run): run for run in runs} == results


def of(**settings):
    """The published runs of these settings, and a Run's defaults for all others but seed."""
    wanted = {name: getattr(Run(**settings), name) for name in SETTINGS if name != "seed"}
    return [run for run in RUNS if wanted.items() <= run.items()]


def lengths(read, more, arm, tau, which="right"):
    return shares(RUNS, read, more, which, row="lengths", arm=arm, tau=tau)


def ahead(more, read, tau):
    """Difference less average in points, like "+10 ± 1"."""
    return lookup.lead(RUNS, more, read, tau)


def span(numbers, digits=0):
    return f"{min(numbers):.{digits}f} to {max(numbers):.{digits}f}"


def test_the_pages_say_what_the_data_say():
    for page, tables in lookup.tables_of(RUNS).items():
        for table in tables.values():
            assert has_part(page, table)
    two = [run["own"]["8"][0] for run in of(arm="softmax", heads=2, lr=4.5e-3)]
    four = sorted(run["own"]["16"][0] for run in of(arm="softmax", heads=4, lr=3e-3))
    said = [
        f"With two, five of five models are right in 0 % beside 16, and in {span(two)} % beside 8",
        f"three of five models are right in {span(four[2:])} % beside 16, and two never",
        f"by {ahead('+256', 'own', 2.0)[1:]} points at cap 2",
    ]
    plain = [percent(lengths("own", "0", "softmax", tau)) for tau in lookup.CAPS]
    said.append("right in {} % at cap 1.5, in {} % at 2, and in {} %".format(*plain))
    one_map = [percent(lengths("1", more, "softmax", 2.0)) for more in ("+256", "+1024")]
    said.append("(piloted) | held, {} and {} |".format(*one_map))
    for more in ("+256", "+1024"):
        said.append(f"{ahead(f'{more} in 16 crowds', '1', 2.0)} beside {int(more):,}")
    for arm in MINUS:
        rows = [run for run in RUNS if run["row"] == "lengths" and run["tau"] is not None]
        learned = [run["lambda"] for run in rows if run["arm"] == arm]
        said.append(f"({span(learned, 2)}")
    shares_of_crowd = []  # of the errors beside 1,024 more
    for tau in (2.0, 1.5):
        wrong = sum(100 - right for right in lengths("own", "+1024", "diff", tau))
        crowd = sum(lengths("own", "+1024", "diff", tau, "crowd"))
        shares_of_crowd.append(100 * crowd / wrong)
    said.append("At the cap 2 {:.0f} % of them do, and at 1.5 {:.0f} %".format(*shares_of_crowd))
    text = " ".join(map(words_of, ("lookup.md", "longer.md", "predictions.md")))
    assert [sentence for sentence in said if sentence not in text] == []
    assert four[:2] == [0, 0] and max(lengths("own", "+1024", "diff", 2.5, which="crowd")) < 0.05
    assert [ahead("+256", "own", tau)[:3] for tau in (1.5, 3.5)] == ["+77", "+14"]
    assert all(sum(shares(RUNS, "own", "16", row=NAMES[arm])) / 10 > 99.9 for arm in MINUS)


@pytest.mark.parametrize("norm, lr, n", [
    (1, 2e-3, 0), (1, 3e-3, 1), (1, 4.5e-3, 2), (0, 2e-3, 5), (0, 3e-3, 5), (0, 4.5e-3, 5),
])
def test_the_difference_has_no_minus_in_n_of_five_runs(norm, lr, n):
    low, high = (-1e9, -1.9e6) if norm else (-15_100, -11.5)
    runs = [run for run in of(arm="diff", lr=lr, norm=norm) if run["seed"] >= 8]
    found = [low < run["lambda"] < high and run["own"]["48"][0] == 0 for run in runs]
    assert len(found) == 5 and sum(found) == n


def test_the_sum_of_two_maps_became_one_map():
    """|lambda| is what stands before the second map: near 0 it is nothing, and large all."""
    found = sorted(abs(run["lambda"]) for run in RUNS if run["row"] == "control: sum of two maps")
    assert len(found) == 5 and round(found[2], 4) == 0.0024 and found[3] > 2.9e6
    assert "in three of five runs (at most 0.0024; only A₁ is left)" in words_of("lookup.md")
