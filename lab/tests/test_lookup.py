"""The look-up: its texts, its model, its plan."""
import math
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lab import lookup
from lab.pairs import Reader, Run, make_texts, score, train
from lab.stats import RESULTS, read_runs

torch.set_num_threads(1)
SETTINGS = [field.name for field in fields(Run)]
RUNS = read_runs(RESULTS / "lookup.json")


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


def test_a_score_counts_right_answers_and_those_that_the_crowd_gives():
    texts = make_texts(0, 64, m=16)  # a score reads 32 of them at once
    said = texts.answer().clone()
    said[:, :2] = texts.value[:, :1]  # two of eight answers are the crowd's
    said[:32, 7] = texts.value[:32, 20]  # and half of the time a third one is another pair's
    logits = iter(F.one_hot(said, 128).split(32))
    assert score(lambda part: next(logits), texts, crowd=16) == [68.75, 25.0]


@pytest.mark.parametrize("arm, loss", [("softmax_average", 4.869276), ("diff", 4.870707)])
def test_training_repeats_that_of_the_published_runs(arm, loss):
    """The losses after 80 steps, as at commit 6d48cee."""
    reader = train(Run(arm, 1e-2, seed=3), steps=80)
    texts = make_texts(10**6, 64)
    found = F.cross_entropy(reader(texts).flatten(0, 1), texts.answer().flatten())
    assert found.item() == pytest.approx(loss, abs=2e-5)


@pytest.mark.parametrize("arm, norm, has_norm", [
    ("softmax", True, True), ("diff_v2", True, True), ("diff", True, True),
    ("diff", False, False), ("softmax_average", False, False),
])
def test_an_output_norm_is_there_or_not(arm, norm, has_norm):
    assert hasattr(Reader(Run(arm, norm=norm)).blocks[0].attn, "subln") == has_norm


def test_the_first_pictures(monkeypatch, capsys):
    monkeypatch.setattr(lookup, "shown_texts", lambda m: make_texts(0, 4, m=m))
    lookup.show(steps=3)
    files = {path.name for path in Path("out/lookup").iterdir()}
    assert files == {"lookup-weights.png", "lookup.png", "shown.jsonl"}


def key(run):
    return str({name: run[name] for name in ("row", *SETTINGS)})


def test_the_planned_runs_are_the_published_ones():
    planned = [dict(row=row) | asdict(run) for row, run in lookup.planned_runs()]
    assert sorted(map(key, planned)) == sorted(map(key, RUNS))


def test_a_run_is_made_once(monkeypatch):
    made = []
    monkeypatch.setattr(lookup, "train", lambda run: made.append(run) or run)
    monkeypatch.setattr(lookup, "measure", lambda run: {"lambda": 0.5})
    for _ in range(2):
        lookup.main(["run"])
    assert len(made) == len(RUNS) == len(read_runs("out/lookup/lookup.jsonl"))
