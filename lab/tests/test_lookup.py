"""Tests of lab/lookup.py: its texts, its maps, the law, and what hiding a crowd means."""
import json
import math
from pathlib import Path

import pytest
import torch

from common import UserError
from lab import lookup
from lab.lookup import ARMS, QUERIES, Reader, Task, make_texts, weights_of_pairs, with_lambda
from lab.sweep import Cache
from model import make_rope

torch.set_num_threads(1)
N = 32


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def reader(arm, held_lambda=None, **settings):
    """A Reader that no one has trained, whose maps are not flat."""
    found = Reader(arm, Task(pairs=N, **settings), seed=1, held_lambda=held_lambda)
    with torch.no_grad():
        found.wte.weight.mul_(3)
        found.blocks[0].attn.q_proj.weight.mul_(3)
    return found


@pytest.mark.parametrize("m", [0, 8])
def test_texts_are_what_the_docstring_says(m):
    texts = make_texts(generator(), 50, N, m)
    for key, value in zip(texts.key.tolist(), texts.value.tolist()):
        assert len(set(key)) == N and min(key) >= 0 and max(key) < 4 * N
        assert len(set(value[:m])) == min(m, 1)
        assert len(set(value)) == N - max(0, m - 1)  # all others are different
        assert min(value) >= 0 and max(value) < 2 * N
    plain = make_texts(generator(), 50, N)
    assert torch.equal(texts.value[:, m:], plain.value[:, m:])
    assert torch.equal(texts.rank, plain.rank)


def test_what_is_added_shares_no_key_and_no_value_with_the_others():
    texts = make_texts(generator(), 20, N, more=200)
    assert texts.key.shape == (20, 200 + N)
    for key, value in zip(texts.key.tolist(), texts.value.tolist()):
        assert len(set(value[:200])) == 1
        assert len(set(value)) == N + 1
        assert not set(key[:200]) & set(key[200:])
        assert len(set(key[200:])) == N


def test_a_token_is_a_key_and_its_value_and_a_query_a_key_and_the_mark():
    model = reader("linear")
    texts = make_texts(generator(), 3, N, 8)
    wte = model.wte.weight
    x = model.tokens(texts)
    place = texts.rank.argsort(-1).argsort(-1)
    for b in range(3):
        pairs = wte[texts.key[b]] + wte[4 * N + texts.value[b]]
        queries = wte[texts.key[b, -QUERIES:]] + wte[6 * N]
        torch.testing.assert_close(x[b, place[b]], pairs, rtol=0, atol=0)
        torch.testing.assert_close(x[b, N:], queries, rtol=0, atol=0)


@pytest.mark.parametrize("tau", [None, 2.0])
@pytest.mark.parametrize("arm", ARMS)
def test_the_rows_of_the_queries_are_those_of_the_layer(arm, tau):
    model = reader(arm, tau=tau)
    block = model.blocks[0]
    texts = make_texts(generator(), 3, N, 8)
    x = model.tokens(texts)
    A, _ = model.look_up(x)
    expected = block.attn.map(block.norm1(x))[:, :, -QUERIES:]
    torch.testing.assert_close(A, expected, rtol=0, atol=1e-6)
    # and so the logits are those of a GPT
    rope = make_rope(torch.arange(x.shape[1]), model.config, x.dtype)
    logits = model.logits(block(x, rope)[:, -QUERIES:])[..., 4 * N : 6 * N]
    torch.testing.assert_close(model(texts), logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("arm, base", [("softmax sum", "diff"), ("linear sum", "diff_linear")])
def test_a_sum_has_no_minus(arm, base):
    model = reader(arm)
    layer = model.blocks[0].attn
    A, _ = model.look_up(model.tokens(make_texts(generator(), 3, N, 8)))
    first, _ = reader(base, 0.0).look_up(model.tokens(make_texts(generator(), 3, N, 8)))
    minus_one, _ = reader(base, 1.0).look_up(model.tokens(make_texts(generator(), 3, N, 8)))
    second = first - minus_one
    lam = layer.lambda_full().abs()
    torch.testing.assert_close(A, (first + lam * second) / (1 + lam))
    if arm == "softmax sum":
        torch.testing.assert_close(A.sum(-1), torch.ones_like(A.sum(-1)))


@pytest.mark.parametrize("tau", [None, 2.0])
def test_minus_the_average_takes_the_same_from_every_token(tau):
    texts = make_texts(generator(), 3, N, 8)
    plain = reader("softmax", tau=tau)
    minus = reader("softmax minus average", 0.7, tau=tau)
    A, _ = plain.look_up(plain.tokens(texts))
    B, _ = minus.look_up(minus.tokens(texts))
    n = N + 1 + torch.arange(QUERIES)[:, None]  # a query sees itself and those before it
    torch.testing.assert_close(B, torch.where(A > 0, A - 0.7 / n, 0))


def test_the_delta_rule_as_a_map_is_its_recurrence():
    model = reader("delta").double()
    layer = model.blocks[0].attn
    x = torch.randn(1, 10, 64, generator=generator(), dtype=torch.float64)
    q, k, v, _ = layer.project(x)  # (1, 2, 10, d)
    beta = torch.sigmoid(layer.beta(x))
    y = layer.map(x) @ v
    for head in range(2):
        S = torch.zeros(32, 32, dtype=torch.float64)
        for t in range(10):
            key = k[0, head, t, :32]
            u = beta[0, t, head] * (v[0, head, t] - S @ key)
            S = S + torch.outer(u, key)
            torch.testing.assert_close(S @ q[0, head, t], y[0, head, t])


def test_beta_starts_with_what_the_seed_gives():
    torch.manual_seed(5)
    first = reader("delta").state_dict()["blocks.0.attn.beta.weight"]
    torch.manual_seed(6)
    assert torch.equal(first, reader("delta").state_dict()["blocks.0.attn.beta.weight"])
    expected = torch.empty(2, 64).normal_(std=1 / math.sqrt(3 * 64), generator=generator(1))
    assert torch.equal(first, expected)  # as the published runs had it


def test_of_two_tokens_the_value_sees_its_key():
    model = reader("linear", two_tokens=True)
    texts = make_texts(generator(), 3, N)
    other = make_texts(generator(), 3, N)
    x = model.tokens(texts)
    assert x.shape == (3, 2 * N + QUERIES, 64)
    # the weight of a pair is that of its value's token
    A, v = model.look_up(x)
    where = texts.rank[1].argsort().argsort()[5]
    assert torch.equal(weights_of_pairs(model, texts)[1, :, :, 5], A[1, :, :, 2 * where + 1])
    # another key changes what the token of its value holds, and the next pair's key, but no more
    free = ({*range(4 * N)} - {*texts.key[1].tolist()}).pop()
    other.key[1, 5] = free
    _, changed = model.look_up(model.tokens(other))
    places = (changed[1] != v[1]).any(-1).any(0).nonzero().flatten().tolist()
    assert places == [2 * where, 2 * where + 1]


@pytest.mark.parametrize("tau", [1.5, 2.0])
def test_the_largest_logit_is_tau(tau):
    """So a weight is at most e^(2 tau) times another one, and with wrong logits of 0 e^tau."""
    A = weights_of_pairs(reader("softmax", tau=tau, heads=1), make_texts(generator(), 20, N))
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
    other.value[:, :8] = 0  # another value for the crowd
    kept = texts.without(8)
    assert kept.key.shape == (20, N - 8)
    assert torch.equal(kept.answer(), texts.answer())
    assert torch.equal(model(kept), model(other.without(8)))
    assert (model(texts) - model(other)).abs().max() > 1e-3
    # those that are left stand in the same order
    seen = model.tokens(texts)[0].tolist()
    left = [token for token in model.tokens(kept)[0].tolist() if token in seen]
    assert left == [token for token in seen if token in left]


@pytest.mark.parametrize("arm", ["softmax minus average", "diff"])
def test_the_same_weights_are_read_with_another_lambda(arm):
    texts = make_texts(generator(), 3, N, 8)
    learned = reader(arm)
    held = with_lambda(learned, 1.0)
    assert held.get_lambda() == 1
    assert torch.equal(held(texts), reader(arm, 1.0)(texts))
    assert (held(texts) - learned(texts)).abs().max() > 1e-3
    own = with_lambda(learned, learned.get_lambda().item())
    torch.testing.assert_close(own(texts), learned(texts))


def test_one_map_is_read_minus_the_average():
    texts = make_texts(generator(), 3, N, 8)
    plain = reader("softmax")
    assert plain.get_lambda() is None
    assert torch.equal(with_lambda(plain, 1.0)(texts), reader("softmax minus average", 1.0)(texts))
    torch.testing.assert_close(with_lambda(plain, 0.0)(texts), plain(texts))


def test_an_arm_is_trained_at_its_best_rate_and_a_restart_trains_nothing(monkeypatch):
    made = []

    def run_once(lr, seed, steps, **settings):
        made.append((lr, seed, steps))
        return dict(losses={"0": abs(math.log(lr / 4.5e-3))}, accuracy={"0": 1.0}, loss=1.0)

    monkeypatch.setattr(lookup, "run_once", run_once)
    rows = lookup.run_arm(Cache("runs.jsonl"), "diff", Task())
    assert [row["seed"] for row in rows] == [3, 4, 5, 6, 7]
    assert {row["lr"] for row in rows} == {4.5e-3}
    assert {steps for _, seed, steps in made if seed < 3} == {2000}
    assert {steps for _, seed, steps in made if seed >= 3} == {8000}
    before = len(made)
    assert lookup.run_arm(Cache("runs.jsonl"), "diff", Task()) == rows
    assert len(made) == before


@pytest.mark.parametrize("lambda_is, expected", [("learned", 0.2), ("1", 1), ("1 in tests", 0.2)])
def test_a_run_has_the_fields_that_a_page_needs(monkeypatch, lambda_is, expected):
    monkeypatch.setattr(lookup, "LONG_CROWDS", (64,))
    monkeypatch.setattr(lookup, "CURVE_EVERY", 2)
    monkeypatch.setattr(lookup, "crowds", lambda N, arm: [0, 8, 48])
    task = Task(tau=2.0, heads=1, steps=2, lambda_is=lambda_is)
    model, row = lookup.train_and_test("softmax minus average", task, 1e-3, 3)
    json.dumps(row)
    assert list(row["accuracy"]) == list(row["accuracy_hidden"]) == ["0", "8", "48"]
    assert list(row["accuracy_long"]) == ["64"]
    assert list(row["curve"][0]) == ["step", "loss 0", "accuracy 0", "loss 32", "accuracy 32"]
    assert row["lambda"] == pytest.approx(expected, abs=0.05)
    in_tests = 0.2 if lambda_is == "learned" else 1
    assert model.get_lambda().item() == pytest.approx(in_tests, abs=0.05)
    plain, *crowded = row["losses"].values()
    assert row["loss"] == pytest.approx(sum(crowded) / len(crowded))
    assert plain == pytest.approx(math.log(128), rel=0.1)  # it has learned nothing in two steps


def test_the_border_is_where_half_are_right():
    assert lookup.border(dict(accuracy={"0": 1.0, "8": 0.75, "16": 0.25})) == 12
    assert lookup.border(dict(accuracy={"0": 1.0, "48": 0.9})) == math.inf
    assert lookup.border(dict(accuracy={"0": 0.4, "48": 0.1})) == 0  # it finds nothing anyway


def some_rows():
    """Rows as runs would write them, some of them twice, of two tasks. One arm lacks a seed."""
    rows = []
    for task, arms in ((lookup.softmax_task(2.0), lookup.SOFTMAX), (Task(), lookup.LINEAR[:4])):
        for arm in arms:
            shares = {str(m): 1 - m / 100 for m in lookup.crowds(64, arm)}
            for seed in (7, 3, 1, 6, 4, 5, 3):
                row = dict(arm=arm, **task.__dict__, lr=2e-3, seed=seed, machine="cpu")
                row["lambda"] = None if arm in ("softmax", "linear") else 0.5
                row |= dict(accuracy=shares, accuracy_hidden=shares, losses=shares, loss=0.1 * seed)
                row |= dict(accuracy_long={"64": 0.2, "4096": 0.1}, largest_is_right=[1.0])
                rows.append(row)
    return [row for row in rows if (row["arm"], row["seed"]) != ("diff", 4)]


def test_rows_are_reported_by_seed_whatever_is_there_twice():
    found = lookup.reported(some_rows(), lookup.softmax_task(2.0), ["diff", "softmax"])
    assert [(row["arm"], row["seed"]) for row in found] == [("softmax", n) for n in (3, 4, 5, 6, 7)]
    assert found[0]["task"] == "pairs 64, tau 2.0, heads 1, steps 1500, lambda_is learned"


def test_publish_shows_the_arms_that_are_finished(tmp_path):
    with pytest.raises(UserError, match="nothing to publish"):
        lookup.main(["publish"])
    for row in some_rows():
        Cache(tmp_path / "runs.jsonl").append(json.dumps(row))
    lookup.main(["publish", f"--out={tmp_path}"])
    text = (tmp_path / "lookup.md").read_text()
    assert "| softmax minus average | 100 100 100 100 100 |" in text
    assert "| diff |" not in text  # it lacks a seed
    assert "98.3% interval" in text and "0.000 ± " in text
    for name in ("lookup.json", "lookup.png", "law.png", "long.png"):
        assert (tmp_path / name).stat().st_size > 1000


def test_the_demo_trains_three_models_and_draws_them(monkeypatch):
    monkeypatch.setattr(lookup, "LONG_CROWDS", ())
    monkeypatch.setattr(lookup, "crowds", lambda N, arm: [0, 16])
    monkeypatch.setattr(lookup, "softmax_task", lambda tau: Task(tau=tau, heads=1, steps=2))
    lookup.main(["--out=here/below", "--seed=3"])
    out = Path("here/below")
    assert "| arm | m = 0 | m = 16 |" in (out / "demo.md").read_text()
    assert [run["seed"] for run in json.loads((out / "demo.json").read_text())["runs"]] == [3, 3, 3]
    assert (out / "demo.png").exists() and (out / "demo_weights.png").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(lookup, "train_reader", None)
    (tmp_path / "file").touch()
    for verb in ([], ["softmax"], ["linear"]):
        with pytest.raises(UserError, match="can't be written"):
            lookup.main([*verb, f"--out={tmp_path}/file"])
