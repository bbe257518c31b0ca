"""Tests of experiments/crowd.py and recall.py: the tasks, the arms' equations, and their runs."""
import itertools
import json
import math

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from experiments import crowd, recall
from experiments.crowd import Arm, Group, Reader, Run, make_texts


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("m", [0, 1, 5, 8])
def test_texts_are_what_the_docstring_says(m):
    N = 16
    texts = make_texts(seeded(), 20, N, m)
    for b in range(20):
        pairs = list(zip(texts.key[b, :N].tolist(), (texts.other[b, :N] - 4 * N).tolist()))
        keys = [key for key, _ in pairs]
        values = [value for _, value in pairs]
        assert len(set(keys)) == N
        assert max(keys) < 4 * N
        assert 0 <= min(values) and max(values) < 2 * N
        # the crowd shares a value, and all other values differ from it and from each other
        assert len(set(values)) == N - max(0, m - 1)
        # a query is a key with the mark of a query. Its answer stands in a pair outside the crowd
        assert texts.other[b, N:].tolist() == [6 * N] * crowd.QUERIES
        for key, answer in zip(texts.key[b, N:].tolist(), texts.answer[b].tolist()):
            assert (key, answer) in pairs
            assert values.count(answer) == 1
        assert len(set(texts.key[b, N:].tolist())) == crowd.QUERIES
        # place says where the pairs stand
        crowd_values = {values[place] for place in texts.place[b, :m].tolist()}
        assert len(crowd_values) <= 1
        asked = [keys[place] for place in texts.place[b, -crowd.QUERIES :].tolist()]
        assert asked == texts.key[b, N:].tolist()


@pytest.mark.parametrize("name", [
    "softmax", "diff norm", "linear 2 heads", "diff_linear", "diff_linear norm", "linear decay",
    "diff_linear norm decay"])
def test_the_rows_of_the_queries_are_those_of_model_py(name):
    model = Reader(Run(name, lr=1e-3, seed=1, pairs=16)).double()
    texts = make_texts(seeded(), 3, 16, 4)
    block = model.gpt.blocks[0]
    with torch.no_grad():
        x = model.embed(texts)
        whole_map = block.attn.map(block.norm1(x))
        rows = model.join(model.branch_maps(block.norm1(x)))
        y = block(x, model.gpt.rope_from(0, x.shape[1]))
        logits = F.linear(model.gpt.norm(y), model.gpt.wte.weight)
    # 1e-6: the mask of a decay is computed in float32
    torch.testing.assert_close(rows, whole_map[:, :, 16:], atol=1e-6, rtol=0)
    torch.testing.assert_close(model(texts), logits[:, 16:, 64:96], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", [
    "softmax", "diff norm", "linear", "diff_linear norm", "signed norm", "delta norm",
    "linear decay"])
def test_a_crowd_that_is_hidden_changes_nothing(name):
    model = Reader(Run(name, lr=1e-3, seed=1, pairs=32))
    texts = make_texts(seeded(), 3, 32, 8)
    other = texts.other.clone()
    for b in range(3):
        other[b, texts.place[b, :8]] = 6 * 32 - 1  # another value in the whole crowd
    changed = crowd.Texts(texts.key, other, texts.answer, texts.place)
    with torch.no_grad():
        seen = (model(texts) - model(changed)).abs().max()
        mask = model.mask_without_crowd(texts, 8)
        hidden = (model(texts, mask) - model(changed, mask)).abs().max()
        whole = model(texts, model.mask_without_crowd(texts, 0))
        torch.testing.assert_close(whole, model(texts), atol=0, rtol=0)
    assert seen > 1e-3
    assert hidden == 0


@pytest.mark.parametrize("tau", [0.5, 3.0])
def test_the_largest_logit_of_a_capped_map_is_tau(tau):
    q = torch.tensor([[7.0, 0.0]])
    k = torch.tensor([[0.1, 0.0], [0.0, 5.0], [-2.0, 0.0]])
    A = crowd.softmax_map(q, k, torch.ones(1, 3), tau)[0]
    assert math.log(A[0] / A[1]) == pytest.approx(tau, rel=1e-4)  # for q, k of any length
    assert math.log(A[0] / A[2]) == pytest.approx(2 * tau, rel=1e-4)


def joined(arm, lam):
    """What an arm makes of two branches of 0.5 and 0.25, with a lambda of lam."""
    model = Reader(Run("diff_linear", lr=1e-3, seed=1, pairs=8))
    model.arm = arm
    model.layer.lambda_full = lambda: torch.tensor(lam)
    A = torch.tensor([0.5, 0.25]).view(1, 2, 1, 1)
    return model.join(A).item()


def test_how_the_branches_are_joined():
    assert joined(Arm("diff_linear"), 0.4) == pytest.approx(0.5 - 0.4 * 0.25)
    assert joined(Arm("diff_linear", combine="plus"), 0.4) == pytest.approx(0.5 + 0.4 * 0.25)
    assert joined(Arm("diff_linear", combine="plus"), -0.4) == pytest.approx(0.5 - 0.4 * 0.25)
    # a mean stays a plus, even if the learned lambda has another sign
    mean = (0.5 + 0.4 * 0.25) / 1.4
    assert joined(Arm("diff_linear", combine="mean"), 0.4) == pytest.approx(mean)
    assert joined(Arm("diff_linear", combine="mean"), -0.4) == pytest.approx(mean)
    assert joined(Arm("diff_linear", frozen_lambda=0.9), 0.4) == pytest.approx(0.5 - 0.9 * 0.25)
    assert joined(Arm("diff_linear", frozen_lambda=0.0), 0.4) == pytest.approx(0.5)


def test_a_frozen_lambda_is_not_trained(monkeypatch):
    monkeypatch.setattr(crowd, "TEST_TEXTS", 4)
    row = crowd.do_run(Run("lambda=0.75", lr=1e-2, seed=1, pairs=8, steps=3))
    assert row["lambda"] == 0.75
    learned = crowd.do_run(Run("diff_linear", lr=1e-2, seed=1, pairs=8, steps=3))
    assert learned["lambda"] != pytest.approx(0.2, abs=1e-6)


def test_signed_features_give_weights_of_both_signs():
    q = torch.tensor([[2.0, 0.0]])
    k = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    A = crowd.signed_map(q, k, torch.ones(1, 2))[0]
    torch.testing.assert_close(A, torch.tensor([2.0, -2.0]) / math.sqrt(2))


def test_the_delta_rule_as_a_map_is_its_recurrence():
    q, k, v = torch.randn(3, 1, 12, 4, generator=seeded(), dtype=torch.float64)
    beta = torch.rand(1, 12, generator=seeded(1), dtype=torch.float64)
    y = crowd.delta_map(q, k, torch.ones(12, 12).double().tril(), beta) @ v

    unit_q = F.normalize(q[0], dim=-1)
    unit_k = F.normalize(k[0], dim=-1)
    state = torch.zeros(4, 4, dtype=torch.float64)
    for t in range(12):
        lacks = beta[0, t] * (v[0, t] - state @ unit_k[t])
        state = state + torch.outer(lacks, unit_k[t])
        torch.testing.assert_close(y[0, t], state @ unit_q[t])


def test_failing_crowd():
    # the right pair (the last) has 3 and the others 1: a crowd of 3 ties, and a tie is not right
    A = torch.ones(1, 20)
    A[0, -1] = 3
    assert crowd.failing_crowd(A) == pytest.approx(2.5)
    A[0, :12] = 0.1  # all of the largest crowd together have 1.2
    assert math.isnan(crowd.failing_crowd(A))
    A[0, 15] = 4  # a single other pair has more
    assert crowd.failing_crowd(A) == pytest.approx(0.5)


def test_the_law_holds_on_an_untrained_layer():
    doses, caps = crowd.law(texts=500)
    sharp = doses[doses["std of keys"] == 3]
    assert sharp["lambda"].tolist() == list(crowd.DOSE)
    for _, row in sharp.iterrows():
        if row["lambda"] == 1:
            assert math.isnan(row["measured"])  # the crowd never wins
        else:
            # at 0.9 a crowd of 20 is a sum of much noise
            bound = 0.15 if row["lambda"] <= 0.75 else 0.5
            assert row["measured"] == pytest.approx(row["m0 / (1 - lambda)"], rel=bound)
    for _, row in caps.iterrows():
        assert math.isnan(row["minus the uniform map"])
        if row["tau"] <= 3:
            assert row["one map"] == pytest.approx(row["e^tau"], rel=0.33)


def fake_run(run):
    """A run whose best rate is 3e-2, above the largest that is tried first."""
    loss = abs(math.log(run.lr / 3e-2))
    row = {"arm": run.arm, "lr": run.lr, "seed": run.seed, "pairs": run.pairs, "steps": run.steps,
           "tau": run.tau}
    return row | {"mean accuracy": 0.5, "loss": loss, "seconds": 0}


def test_a_rate_at_the_edge_is_extended(tmp_path, monkeypatch):
    monkeypatch.setattr(crowd, "do_run", fake_run)
    runs = crowd.Runs(tmp_path, procs=1)
    like = Run("linear", 0, 0)
    crowd.choose_rates(runs, [like], choose_seeds=(1, 2))
    assert {run.lr for run in runs.rows} == {3e-3, 1e-2, 3e-2, 1e-1}
    assert {run.seed for run in runs.rows} == {1, 2}
    assert runs.best_rate(like) == 3e-2
    # a run on another seed is reported if it has that rate
    runs.finish([Run("linear", lr, 3) for lr in (1e-2, 3e-2)])
    df = crowd.reported(runs, pd.DataFrame(runs.rows.values()))
    assert df[["lr", "seed"]].values.tolist() == [[3e-2, 3]]


def test_a_run_that_chose_a_rate_is_not_reported(tmp_path):
    for flag in ("--seed=1,3", "--choose_on=3"):
        with pytest.raises(ValueError, match="a run that chose a rate is not reported"):
            crowd.main(["train", flag, f"--out={tmp_path}"])


@pytest.fixture
def small(monkeypatch):
    """Two arms, few texts, little to choose from."""
    monkeypatch.setattr(crowd, "TEST_TEXTS", 8)
    monkeypatch.setattr(crowd, "RATES", (3e-3,))
    monkeypatch.setattr(crowd, "LADDER", (3e-3,))
    monkeypatch.setattr(crowd, "GROUPS", {"small": Group(tuple(crowd.SHOWN))})
    monkeypatch.setattr(crowd, "PICTURE_PAIRS", 32)


def test_all_parts_run_stop_and_go_on(tmp_path, small, monkeypatch, capsys):
    out = f"--out={tmp_path}"
    flags = ["--steps=2", "--procs=1", "--seed=3,4", out]
    crowd.main(["train", *flags])
    crowd.main(["phase", "--pairs=32", "--tau=1,2", *flags])
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    n_train = len(crowd.SHOWN) * 4  # two seeds to choose a rate, two to report
    arms = len(crowd.PHASE_ARMS)
    n_phase = arms * 2 * (2 + 2)  # arms x sharpness, each on two seeds for its rate and two more
    assert len(rows) == n_train + n_phase
    assert all(len(row["accuracy"]) == 5 and math.isfinite(row["loss"]) for row in rows)

    # the same commands train nothing again. With one line lost and one cut they make these two
    (tmp_path / "runs.jsonl").write_text("\n".join(lines[:-2]) + "\n" + lines[-2][:20])
    trained = []
    do_run = crowd.do_run
    monkeypatch.setattr(crowd, "do_run", lambda run: trained.append(run) or do_run(run))
    crowd.main(["train", *flags])
    crowd.main(["phase", "--pairs=32", "--tau=1,2", *flags])
    assert len(trained) == 2
    again = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]

    # runs of more steps are another task: they don't belong into the lines of the figure
    drawn = []
    draw = crowd.draw_accuracy
    monkeypatch.setattr(crowd, "draw_accuracy", lambda ax, df: drawn.append(df) or draw(ax, df))
    crowd.main(["train", "--steps=3", "--procs=1", "--seed=3", out])
    crowd.main(["figure", "--steps=2", out])
    assert set(drawn[0]["steps"]) == {2}
    published = json.loads((tmp_path / "crowd.json").read_text())
    n_longer = len(crowd.SHOWN) * 3
    assert len(published["runs"]) == n_train + n_longer
    table = next(iter(published["tables"].values()))
    assert {row["arm"]: row["n"] for row in table} == dict.fromkeys(crowd.SHOWN, 2)
    assert len(json.loads((tmp_path / "phase.json").read_text())["runs"]) == n_phase
    crowd.main(["maps", "--steps=2", out])
    assert (tmp_path / "maps.png").stat().st_size > 10_000
    assert (tmp_path / "dose.png").stat().st_size > 10_000
    assert (tmp_path / "crowd.png").stat().st_size > 10_000
    assert (tmp_path / "phase.png").stat().st_size > 10_000


def test_what_can_not_be_drawn_or_trained_is_refused(tmp_path, small):
    out = f"--out={tmp_path}"
    for verb, flag, says in [
        ("figure", "--procs=1", "no runs in .*runs.jsonl"),
        ("phase", "--pairs=32,31", "--pairs takes numbers from 32 on"),
    ]:
        with pytest.raises(ValueError, match=says):
            crowd.main([verb, flag, out])
    assert not (tmp_path / "runs.jsonl").exists()

    # capped softmax needs no other runs for its figure
    crowd.main(["phase", "--pairs=32", "--tau=1", "--steps=2", "--seed=3", "--procs=1", out])
    crowd.main(["figure", "--steps=2", out])
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["phase.png"]


def test_the_maps_of_the_figure_are_sorted_by_what_a_query_should_see(monkeypatch):
    def known_maps(model, x):
        # each query gives 1 to its right pair and 2 to the crowd
        A = torch.zeros(1, 4, crowd.QUERIES, model.pairs + crowd.QUERIES)
        for query, place in enumerate(texts[-1].place[0, -crowd.QUERIES :]):
            A[..., query, place] = 1
        A[..., texts[-1].place[0, :8]] = 2
        return A

    texts = []
    make = crowd.make_texts
    monkeypatch.setattr(crowd, "make_texts", lambda *args: texts.append(make(*args)) or texts[-1])
    monkeypatch.setattr(crowd, "train_reader", lambda run: Reader(run))
    monkeypatch.setattr(Reader, "branch_maps", known_maps)
    monkeypatch.setattr(crowd, "PICTURE_PAIRS", 32)
    maps, lam = crowd.example_maps(steps=1)
    expected = torch.zeros(crowd.QUERIES, 32)
    expected[:, : crowd.QUERIES] = torch.eye(crowd.QUERIES)
    expected[:, -8:] = 2
    assert torch.equal(maps[0], expected)
    torch.testing.assert_close(maps[2], expected * (1 - lam))


def test_recall_texts():
    text, answer, place = recall.make_texts(seeded(), 50, 40, N=6, R=3)
    for b in range(50):
        pairs = text[b][place[b]]
        assert pairs.max() < recall.FIRST_QUERY
        keys = (pairs // recall.VALUES).tolist()
        values = (pairs % recall.VALUES).tolist()
        assert len(set(keys)) == 6
        assert text[b, -3:].tolist() == [recall.FIRST_QUERY + key for key in keys[:3]]
        assert answer[b].tolist() == [recall.FIRST_VALUE + value for value in values[:3]]
        assert (text[b, :-3] >= recall.FIRST_FILLER).sum() == 40 - 3 - 6
    for depth, where in [(0.0, 0), (0.5, 18), (1.0, 36)]:
        _, _, place = recall.make_texts(seeded(), 50, 40, N=6, R=3, depth=depth)
        assert (place[:, 0] == where).all()


def test_recall_attention_of_a_flat_map():
    # linear attention whose queries are all zero, so that every weight is the same
    model = recall.train_model("linear", seed=1, lr=1e-3, steps=0, decay=False, device="cpu")
    model.config.rope_theta = 0
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn.q_proj.weight)
        torch.nn.init.zeros_(block.attn.k_proj.weight)
    for layer in recall.attention_shares(model, 10, "cpu", T=32, N=4, depth=0.5):
        for kind in ("share", "signed"):
            assert layer[f"answer, {kind}"] == pytest.approx(1 / 32, rel=1e-4)
            assert layer[f"noise, {kind}"] == pytest.approx(30 / 32, rel=1e-4)


def test_recall_from_training_to_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(recall, "LENGTHS", (32, 64))
    flags = ["--seed=3,4", "--choose_on=1", "--steps=2", "--texts=4", "--procs=1"]
    titles = []
    monkeypatch.setattr(recall.report, "add_title", lambda figure, title: titles.append(title))
    recall.main([*flags, f"--out={tmp_path}"])
    without = (tmp_path / "recall.json").read_bytes()
    recall.main([*flags, "--decay", f"--out={tmp_path}"])
    assert (tmp_path / "recall.json").read_bytes() == without
    assert json.loads((tmp_path / "recall_decay.json").read_text())["about"]["decay"] is True
    assert ["with decay" in title for title in titles] == [False, True]
    published = json.loads((tmp_path / "recall.json").read_text())
    runs = {(row["attn"], row["seed"], row["lr"]) for row in published["runs"]}
    trials = set(itertools.product(recall.ATTENTION, [1], [1e-3, 3e-3, 1e-2, 3e-2]))
    assert trials < runs
    reported = {(attn, seed) for attn, seed, _ in runs - trials}
    assert reported == set(itertools.product(recall.ATTENTION, [3, 4]))
    assert len(runs - trials) == len(reported)
    # each arm at the rate with the lowest loss on the seed that chose
    df = pd.DataFrame(published["runs"])
    losses = df[(df["by"] == "pairs") & (df["seed"] == 1)].groupby(["attn", "lr"])["loss"].mean()
    best = {(attn, losses[attn].idxmin()) for attn in recall.ATTENTION}
    assert {(attn, lr) for attn, _, lr in runs - trials} == best
    assert "The seeds that chose: 1" in (tmp_path / "recall.md").read_text()
    with pytest.raises(ValueError, match="share 3"):
        recall.main(["--seed=3", "--choose_on=3"])
    assert (tmp_path / "recall.png").stat().st_size > 10_000

    # the same command trains nothing again, but for a run whose line was cut
    file = tmp_path / "runs.jsonl"
    n_runs = len(file.read_text().splitlines())
    file.write_text(file.read_text()[:-20])
    trained = []
    do_run = recall.do_run
    monkeypatch.setattr(recall, "do_run", lambda job: trained.append(job) or do_run(job))
    recall.main([*flags, "--decay", f"--out={tmp_path}"])
    assert len(trained) == 1
    assert len(file.read_text().splitlines()) == n_runs
