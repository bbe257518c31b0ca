"""Tests of experiments/lookup.py: its texts, its maps, the law, and what hiding a crowd means."""
import math

import pytest
import torch

from experiments import lookup
from experiments.lookup import (
    ARMS,
    QUERIES,
    Reader,
    Task,
    delta_map,
    make_long_texts,
    make_texts,
    weights_of_pairs,
)
from experiments.sweep import Cache
from model import distances, log_mask

torch.set_num_threads(1)
N = 32


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def reader(arm, **settings):
    model = Reader(arm, Task(pairs=N, **settings), seed=1)
    with torch.no_grad():
        model.gpt.wte.weight.mul_(3)  # so that the maps are not flat
        model.layer.q_proj.weight.mul_(3)
    return model


@pytest.mark.parametrize("m", [0, 8])
def test_texts_are_what_the_docstring_says(m):
    texts = make_texts(generator(), 50, N, m)
    pairs = texts.key[:, :N].gather(1, texts.place)  # in the order in which they were drawn
    values = texts.value_or_mark[:, :N].gather(1, texts.place) - 4 * N
    for key, value in zip(pairs.tolist(), values.tolist()):
        assert len(set(key)) == N and max(key) < 4 * N
        assert len(set(value[:m])) == min(m, 1)
        assert len(set(value)) == N - max(0, m - 1)  # all others are different
        assert 0 <= min(value) and max(value) < 2 * N
    # the queries ask for the last pairs drawn, and the answers are their values
    assert torch.equal(texts.key[:, N:], pairs[:, -QUERIES:])
    assert torch.equal(texts.answer, values[:, -QUERIES:])
    assert (texts.value_or_mark[:, N:] == 6 * N).all()


def test_a_long_crowd_shares_no_key_and_no_value_with_the_others():
    texts = make_long_texts(generator(), 20, N, 200)
    assert texts.key.shape == (20, 200 + N + QUERIES)
    key = texts.key[:, : 200 + N].gather(1, texts.place)
    value = texts.value_or_mark[:, : 200 + N].gather(1, texts.place)
    for keys, values in zip(key.tolist(), value.tolist()):
        assert len(set(values[:200])) == 1
        assert len(set(values)) == N + 1
        assert not set(keys[:200]) & set(keys[200:])
        assert len(set(keys[200:])) == N


@pytest.mark.parametrize("arm", [arm for arm in ARMS if not ARMS[arm].weights])
def test_the_rows_of_the_queries_are_those_of_model_py(arm):
    model = reader(arm)
    layer = model.layer
    x = model.normed_input(model.embed(make_texts(generator(), 3, N, 8)))
    A = model.attention_map(x)
    if ARMS[arm].sum:
        q, k, _, lam = layer.project(x)
        rope = layer.rope_from_0(x)
        log_D = log_mask(torch.zeros(1, 1, 1), distances(x.shape[1], "cpu"))
        both = layer.maps(q, k, rope, rope, log_D)
        expected = (both[:, 0::2] + lam.abs() * both[:, 1::2]) / (1 + lam.abs())
        torch.testing.assert_close(A.sum(-1), torch.ones_like(A.sum(-1)))
    else:
        expected = layer.map(x)
    torch.testing.assert_close(A, expected[:, :, -QUERIES:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("arm", ["softmax", "diff", "linear", "diff_linear"])
def test_the_logits_are_those_of_a_block_of_model_py(arm):
    model = reader(arm)
    texts = make_texts(generator(), 3, N, 8)
    x = model.embed(texts)
    y = model.gpt.norm(model.block(x, model.layer.rope_from_0(x)))[:, -QUERIES:]
    logits = y @ model.gpt.wte.weight[4 * N : 6 * N].T
    torch.testing.assert_close(model(texts), logits, rtol=0, atol=1e-5)


def test_of_two_tokens_the_value_sees_its_key():
    model = reader("linear", two_tokens=True)
    texts = make_texts(generator(), 3, N, 0)
    x = model.embed(texts)
    assert x.shape == (3, 2 * N + QUERIES, 64)
    seen = model.normed_input(x)
    keys = model.block.norm1(model.gpt.wte(texts.key[:, :N]))
    values = model.block.norm1(model.gpt.wte(texts.value_or_mark[:, :N]))
    assert torch.equal(seen[:, 1 : 2 * N : 2, 32:], keys[..., 32:])
    assert torch.equal(seen[:, 1 : 2 * N : 2, :32], values[..., :32])
    # and the weight of a pair is that of its value's token
    A = model.attention_map(seen)
    weights = weights_of_pairs(model, texts)
    where = texts.place[1, 5]
    assert torch.equal(weights[1, :, :, 5], A[1, :, :, 2 * where + 1])


def test_the_delta_rule_as_a_map_is_its_recurrence():
    q = torch.randn(1, 1, 2, 8, generator=generator(1), dtype=torch.float64)
    k = torch.randn(1, 1, 10, 8, generator=generator(2), dtype=torch.float64)
    v = torch.randn(10, 5, generator=generator(3), dtype=torch.float64)
    beta = torch.rand(1, 1, 10, generator=generator(4), dtype=torch.float64)
    mask = torch.ones(2, 10, dtype=torch.float64)
    S = torch.zeros(5, 8, dtype=torch.float64)
    for t in range(10):
        key = k[0, 0, t] / k[0, 0, t].norm()
        S = S + beta[0, 0, t] * torch.outer(v[t] - S @ key, key)
    for row in range(2):
        by_map = (delta_map(q, k, mask, beta)[0, 0, row] @ v).tolist()
        assert by_map == pytest.approx((S @ q[0, 0, row] / q[0, 0, row].norm()).tolist())


@pytest.mark.parametrize("tau", [1.5, 2.0])
def test_the_largest_logit_is_tau(tau):
    """So a weight is at most e^(2 tau) times another one, and with wrong logits of 0 e^tau."""
    model = reader("softmax", tau=tau, heads=1)
    A = model.attention_map(model.normed_input(model.embed(make_texts(generator(), 20, N, 0))))
    A = A[..., :N]
    ratio = A.amax(-1) / A.amin(-1)
    assert 2 < ratio.max() <= math.exp(2 * tau) * 1.001


@pytest.mark.parametrize("tau, m", [(1.5, 4), (1.5, 5), (2.0, 7), (2.0, 8)])
def test_the_law_of_a_constructed_map(tau, m):
    """The right pair has the weight e^tau and m others 1 each. A minus takes their votes away."""
    weights = torch.tensor([math.exp(tau)] + [1.0] * 60)
    A = weights / weights.sum()
    crowd_wins = A[1 : m + 1].sum() > A[0]
    assert crowd_wins == (m > math.exp(tau))
    wrong = A[1]
    difference = A - 0.95 * wrong
    assert difference[1:49].sum() < difference[0]


@pytest.mark.parametrize("two_tokens", [False, True])
@pytest.mark.parametrize("arm", ARMS)
def test_a_crowd_that_is_hidden_is_not_there(arm, two_tokens):
    """The logits are those of the texts that never had these pairs, whatever the crowd's value."""
    model = reader(arm, two_tokens=two_tokens)
    texts = make_texts(generator(), 20, N, 8)
    other = make_texts(generator(), 20, N, 8)
    other.value_or_mark.scatter_(1, other.place[:, :8], 4 * N)  # another value for the crowd
    hidden = model(texts.without(8))
    assert torch.equal(hidden, model(other.without(8)))
    assert (model(texts) - model(other)).abs().max() > 1e-3
    assert texts.without(8).key.shape == (20, N - 8 + QUERIES)
    kept = texts.without(8)
    asked = kept.key.gather(1, kept.place)[:, -QUERIES:]
    assert torch.equal(asked, texts.key[:, N:])


def test_an_arm_is_trained_at_its_best_rate_and_a_restart_trains_nothing(monkeypatch):
    made = []

    def run_once(lr, seed, **settings):
        made.append((lr, seed))
        return dict(losses={"0": abs(math.log(lr / 4.5e-3))}, accuracy={"0": 1.0}, loss=1.0)

    monkeypatch.setattr(lookup, "run_once", run_once)
    rows = lookup.run_arm(Cache("runs.jsonl"), "diff", lookup.Task())
    assert [row["seed"] for row in rows] == [3, 4, 5, 6, 7]
    assert {row["lr"] for row in rows} == {4.5e-3}
    before = len(made)
    assert lookup.run_arm(Cache("runs.jsonl"), "diff", lookup.Task()) == rows
    assert len(made) == before


def test_a_run_has_the_fields_that_a_page_needs(monkeypatch):
    monkeypatch.setattr(lookup, "TEST_TEXTS", 16)
    monkeypatch.setattr(lookup, "LONG_CROWDS", (64,))
    cache = Cache("runs.jsonl")
    settings = Task(tau=2.0, heads=1, steps=4).settings()
    row = cache.run(
        lookup.run_once, arm="softmax minus average", lr=1e-3, seed=3, **settings
    )
    assert list(row["accuracy"]) == ["0", "1", "2", "4", "6", "8", "12", "16", "24", "32", "48"]
    assert list(row["accuracy_hidden"]) == list(row["accuracy"])
    assert 0.15 < row["lambda"] < 0.25
    plain, *crowded = row["losses"].values()
    assert row["loss"] == pytest.approx(sum(crowded) / len(crowded))
    assert plain == pytest.approx(math.log(128), rel=0.1)  # it has learned nothing in four steps


def test_the_border_is_where_half_are_right():
    assert lookup.border(dict(accuracy={"0": 1.0, "8": 0.75, "16": 0.25})) == 12
    assert lookup.border(dict(accuracy={"0": 1.0, "48": 0.9})) is None
    assert lookup.border(dict(accuracy={"0": 0.4, "48": 0.1})) == 0  # it finds nothing anyway


def test_rows_are_reported_by_seed_whatever_is_there_twice():
    settings = Task().settings() | dict(lr=2e-3)
    rows = [settings | dict(arm="diff", seed=seed) for seed in (7, 3, 1, 6, 4, 5, 3)]
    rows += [settings | dict(arm="linear", seed=seed) for seed in (3, 4, 5, 6)]
    found = lookup.reported(rows, Task(), ["diff", "linear"])
    assert list(found) == ["diff"]
    assert [row["seed"] for row in found["diff"]] == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("arm", ["softmax minus average", "diff"])
def test_lambda_can_be_1_in_training_or_in_tests_only(arm):
    texts = make_texts(generator(), 3, N, 8)
    learned = reader(arm)(texts)
    always = reader(arm, lambda_is="1")(texts)
    model = reader(arm, lambda_is="1 in tests")
    assert torch.equal(model(texts), learned)
    assert torch.equal(model.eval()(texts), always)
    assert (always - learned).abs().max() > 1e-3
    assert model.get_lambda() == 1


def test_a_plain_map_is_trained_as_it_is_and_read_minus_the_average():
    texts = make_texts(generator(), 3, N, 8)
    model = reader("softmax", lambda_is="1 in tests")
    assert torch.equal(model(texts), reader("softmax")(texts))
    model(texts).sum().backward()
    assert model.layer.lambda_average.grad is None
    minus = reader("softmax minus average", lambda_is="1")
    assert torch.equal(model.eval()(texts), minus(texts))
