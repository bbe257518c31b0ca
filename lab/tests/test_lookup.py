"""Tests of lab/lookup.py: its texts, its maps, and what a run, a table and the demo give."""
import dataclasses
import json
import math

import pytest
import torch

from common import UserError
from lab import lookup
from lab.lookup import (
    CROWDS, QUERIES, Reader, linear_task, make_texts, softmax_task, weights_of_pairs, with_lambda,
)
from lab.sweep import Cache
from model import make_rope

torch.set_num_threads(1)
N = 32


def texts_of(B, m=0, more=0):
    return make_texts(torch.Generator().manual_seed(0), B, N, m, more)


def reader(arm, held_lambda=None, **settings):
    """A Reader that no one has trained, whose maps are not flat."""
    found = Reader(arm, linear_task(N, **settings), seed=1, held_lambda=held_lambda)
    with torch.no_grad():
        found.wte.weight.mul_(3)
        found.blocks[0].attn.q_proj.weight.mul_(3)
    return found


def map_of(model):
    """What the queries of three texts take from each token."""
    A, _ = model.look_up(model.tokens(texts_of(3, 8)))
    return A


@pytest.mark.parametrize("m, more", [(0, 0), (8, 0), (0, 200)])
def test_a_crowd_shares_a_value_and_all_else_differs(m, more):
    texts = texts_of(50, m, more)
    for key, value in zip(texts.key.tolist(), texts.value.tolist()):
        own = key[more:]
        assert len(set(own)) == N and min(own) >= 0 and max(own) < 4 * N
        assert len(set(value[: m + more])) == min(m + more, 1)
        assert len(set(value)) == N - max(0, m - 1) + min(more, 1)
        assert not set(own) & set(key[:more])


def test_a_token_is_a_key_and_its_value_and_a_query_a_key_and_the_mark():
    model = reader("linear")
    texts = texts_of(1, 8)
    wte = model.wte.weight
    x = model.tokens(texts)[0]
    place = texts.rank[0].argsort().argsort()
    assert torch.equal(x[place], wte[texts.key[0]] + wte[4 * N + texts.value[0]])
    assert torch.equal(x[N:], wte[texts.key[0, -QUERIES:]] + wte[6 * N])


@pytest.mark.parametrize("arm", lookup.ARMS)
def test_the_rows_of_the_queries_are_those_of_the_layer(arm):
    model = reader(arm)
    block = model.blocks[0]
    texts = texts_of(3, 8)
    x = model.tokens(texts)
    expected = block.attn.map(block.norm1(x))[:, :, -QUERIES:]
    torch.testing.assert_close(map_of(model), expected, rtol=0, atol=1e-6)
    # and so the logits are those of a GPT
    rope = make_rope(torch.arange(x.shape[1]), model.config, x.dtype)
    logits = model.logits(block(x, rope)[:, -QUERIES:])[..., 4 * N : 6 * N]
    torch.testing.assert_close(model(texts), logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("arm, base", [("softmax sum", "diff"), ("linear sum", "diff_linear")])
def test_a_sum_has_no_minus(arm, base):
    model = reader(arm)
    first = map_of(reader(base, 0.0))
    second = first - map_of(reader(base, 1.0))
    lam = model.blocks[0].attn.lambda_full().abs()
    torch.testing.assert_close(map_of(model), (first + lam * second) / (1 + lam))


def test_minus_the_average_takes_the_same_from_every_token():
    A = map_of(reader("softmax", tau=2.0))
    B = map_of(reader("softmax minus average", 0.7, tau=2.0))
    n = N + 1 + torch.arange(QUERIES)[:, None]  # a query sees itself and those before it
    torch.testing.assert_close(B, torch.where(A > 0, A - 0.7 / n, 0))


def test_no_logit_is_larger_than_tau():
    A = weights_of_pairs(reader("softmax", tau=2.0, heads=1), texts_of(20))
    ratio = (A.amax(-1) / A.amin(-1)).max()
    assert 2 < ratio <= math.exp(4) * 1.001  # one weight is e^tau, the other one e^-tau


def test_minus_the_own_value_takes_it_from_the_query_alone():
    A = map_of(reader("softmax", tau=2.0))
    B = map_of(reader("softmax minus own", 0.7, tau=2.0))
    own = torch.eye(N + QUERIES)[N:]  # the queries are the last tokens
    torch.testing.assert_close(B, A - 0.7 * own)


def test_of_two_tokens_the_value_sees_its_key():
    model = reader("linear", two_tokens=True)
    texts = texts_of(1)
    A, v = model.look_up(model.tokens(texts))
    where = texts.rank[0].argsort().argsort()[5]  # the place of pair 5
    assert torch.equal(weights_of_pairs(model, texts)[..., 5], A[..., 2 * where + 1])
    # another key changes this token, too
    texts.key[0, 5] = ({*range(4 * N)} - {*texts.key[0].tolist()}).pop()
    _, changed = model.look_up(model.tokens(texts))
    places = (changed != v).any(-1).any(1)[0].nonzero().flatten().tolist()
    assert places == [2 * where, 2 * where + 1]


@pytest.mark.parametrize("two_tokens", [False, True])
@pytest.mark.parametrize("arm", ["diff", "linear minus average"])
def test_a_crowd_that_is_hidden_is_not_there(arm, two_tokens):
    model = reader(arm, two_tokens=two_tokens)
    texts = texts_of(20, 8)
    other = texts_of(20, 8)
    other.value[:, :8] = 0  # another value for the crowd
    assert torch.equal(model(texts.without(8)), model(other.without(8)))
    assert (model(texts) - model(other)).abs().max() > 1e-3


def test_the_same_weights_are_read_with_another_lambda():
    texts = texts_of(3, 8)
    average = reader("softmax minus average", 1.0)(texts)
    for arm in ("softmax", "softmax minus average"):
        assert torch.equal(with_lambda(reader(arm), 1.0)(texts), average)


def test_an_arm_is_trained_at_its_best_rate_and_a_restart_trains_nothing(monkeypatch):
    made = []

    def train_and_test(arm, task, lr, seed):
        made.append((seed, task.steps))
        return None, dict(losses={"0": abs(math.log(lr / 4.5e-3))}, accuracy={"0": 1.0})

    monkeypatch.setattr(lookup, "train_and_test", train_and_test)
    rows = lookup.run_arm(Cache("runs.jsonl"), "diff", linear_task())
    assert [(row["seed"], row["lr"]) for row in rows] == [(seed, 4.5e-3) for seed in range(3, 8)]
    assert {(seed < 3, steps) for seed, steps in made} == {(True, 2000), (False, 8000)}
    made.clear()
    assert lookup.run_arm(Cache("runs.jsonl"), "diff", linear_task()) == rows
    assert made == []


@pytest.mark.parametrize("extra, different", [("agree", 1), ("differ", 64), ("crowds", CROWDS)])
def test_added_pairs_agree_or_differ_or_are_in_crowds(extra, different):
    texts = make_texts(torch.Generator().manual_seed(0), 5, N, 0, 64, extra, values=128)
    for value in texts.value.tolist():
        added = value[:64]
        assert len(set(added)) == different
        assert all(added.count(each) == 64 // different for each in added)
        assert len(set(value)) == N + different  # and none of them is one of the N pairs'


def test_a_number_of_pairs_is_drawn_for_each_step(monkeypatch):
    lengths = set()

    def watched(generator, B, pairs, *args, **more):
        lengths.add(pairs)
        return make_texts(generator, B, pairs, *args, **more)

    monkeypatch.setattr(lookup, "make_texts", watched)
    task = dataclasses.replace(softmax_task(2.0, train_pairs=[16, 20], keys=256), steps=60)
    lookup.train_reader("diff", task, 1e-3, 3)
    assert lengths == {16, 17, 18, 19, 20}


def quick(monkeypatch):
    """A task of two steps, with few tests."""
    monkeypatch.setattr(lookup, "LONG_CROWDS", (64,))
    monkeypatch.setattr(lookup, "LONG_TEXTS", 40)
    monkeypatch.setattr(lookup, "CURVE_EVERY", 2)
    monkeypatch.setattr(lookup, "crowds", lambda N, arm: [0, 8, 48])
    return dataclasses.replace(softmax_task(2.0, values=256), steps=2)


def test_a_run_has_the_fields_that_a_page_needs(monkeypatch):
    task = quick(monkeypatch)
    model, row = lookup.train_and_test("softmax minus average", task, 1e-3, 3)
    assert list(row["accuracy_hidden"]) == ["0", "8", "48"]
    assert list(row["accuracy"]) == ["0", "8", "48", "+64"]
    assert list(row["curve"][0]) == ["step", "loss 0", "accuracy 0", "loss 32", "accuracy 32"]
    assert row["lambda"] == pytest.approx(0.2, abs=0.05)
    assert row["loss"] == pytest.approx((row["losses"]["8"] + row["losses"]["48"]) / 2)
    found = [(test["extra"], test["lambda_test"]) for test in row["tests"]]
    lambdas = ["learned", 0, 0.9, 1]
    assert found == [(extra, lam) for extra in ("agree", "crowds", "differ") for lam in lambdas]
    json.dumps(row)


@pytest.mark.parametrize("arm, held, learned", [("softmax", None, 0.0), ("diff", 0.7, 0.7)])
def test_each_lambda_is_tested_as_a_model_that_holds_it_would_be(monkeypatch, arm, held, learned):
    quick(monkeypatch)
    monkeypatch.setattr(lookup, "crowds", lambda N, arm: [8])
    model = reader(arm, held, tau=2.0)
    texts = lookup.texts_of(model.task, 8)
    rows = lookup.test_lambdas(model, "agree")
    for row, number in zip(rows, (learned, 0.0, 0.9, 1.0)):
        logits = with_lambda(model, number)(texts)
        said = logits.argmax(-1)
        right = (said == texts.answer()).float().mean().item()
        named = (said == texts.value[:, :1]).float().mean().item()
        assert row["accuracy"]["8"] == pytest.approx(right, abs=1e-4)
        assert row["said_crowd"]["8"] == pytest.approx(named, abs=1e-4)


def test_the_weights_of_a_flat_map_are_equal():
    model = reader("softmax")
    with torch.no_grad():
        model.blocks[0].attn.q_proj.weight.zero_()
    found = lookup.weights_in_training(model)
    expected = sum(1 / (N + 1 + i) for i in range(QUERIES)) / QUERIES
    assert found["r"] == pytest.approx(expected, rel=1e-4)
    assert found["c"] == pytest.approx(expected, rel=1e-4)
    assert found["n"] == N + 4.5
    assert found["lambda"] is None


def test_the_border_is_where_half_are_right():
    assert lookup.border(dict(accuracy={"0": 1.0, "8": 0.75, "16": 0.25, "+64": 0})) == 12
    assert lookup.border(dict(accuracy={"0": 1.0, "48": 0.9})) == math.inf
    assert lookup.border(dict(accuracy={"0": 0.4, "48": 0.1})) == 0  # it finds nothing anyway


def test_publish_shows_the_arms_that_are_finished():
    with pytest.raises(UserError, match="nothing to publish"):
        lookup.main(["publish"])
    cache = Cache("out/lookup/runs.jsonl")
    accuracy = {"0": 1.0, "48": 0.25, "+256": 0.1}
    tests = [dict(lambda_test="learned", extra="agree", accuracy=accuracy, said_crowd={})]
    arms = [(arm, softmax_task(2.0)) for arm in lookup.SOFTMAX]
    arms += [(arm, linear_task()) for arm in lookup.LINEAR]
    of_grids = [("diff", softmax_task(2.0, train_pairs=lookup.MIXED, **lookup.MANY))]
    for arm, task in arms + of_grids:
        for seed in (7, 3, 1, 6, 4, 5, 3, 8):  # one of them twice
            row = dict(arm=arm, **task.__dict__, lr=3e-3, seed=seed, machine="cpu", loss=0.1 * seed)
            row |= {"lambda": None, "accuracy": accuracy, "tests": tests}
            if (arm, seed) != ("diff", 4):
                cache.append(json.dumps(row))
    lookup.main(["publish"])
    text = (cache.path.parent / "lookup.md").read_text()
    assert "| softmax minus average | 1 | 0.25 |" in text
    assert "| diff |" not in text  # it lacks a seed
    assert "0.000 ± " in text
    runs = json.loads((cache.path.parent / "lengths.json").read_text())["runs"]
    # 8 is a seed of the grids, and one of their tasks is also one of `softmax`
    assert {(run["arm"], run["seed"]) for run in runs} == {(arm, 8) for arm in lookup.SOFTMAX}
    assert runs[-1]["train_pairs"] == [16, 256]
    for name in ("lookup.json", "lookup.png", "law.png", "lengths.json", "lengths.png"):
        assert (cache.path.parent / name).stat().st_size > 1000


def test_the_demo_trains_three_models_and_draws_them(monkeypatch, tmp_path):
    task = quick(monkeypatch)
    monkeypatch.setattr(lookup, "softmax_task", lambda tau: task)
    lookup.main(["--out=here/below", "--seed=3"])
    out = tmp_path / "here/below"
    assert "| arm | 0 | 8 | 48 |" in (out / "demo.md").read_text()
    runs = json.loads((out / "demo.json").read_text())["runs"]
    assert [run["seed"] for run in runs] == [3, 3, 3]
    for name in ("demo.png", "maps.png"):
        assert (out / name).stat().st_size > 1000
