"""sweep.py and text.py: the search for a rate, the controls, and the tables."""
import json
import math

import pytest
import torch

import train
from common import UserError
from lab import sweep, text
from model import ATTENTION, GPT, GPTConfig, compare_forms

torch.set_num_threads(1)

# flags of a run of a second
TINY = "--preset=toy --device=cpu --n_layer=1 --n_embd=16 --n_head=2 --block_size=16 "
TINY += "--total_batch=32 --steps=2 --eval_tokens=64"

# -----------------------------------------------------------------------------
# sweep.py


@pytest.mark.parametrize("start, best, factor, expected", [
    (0.002, 0.002, 2, 0.002),
    (0.002, 0.016, 2, 0.016),  # three factors above the start
    (0.002, 0.0005, 2, 0.0005),
    (0.003, 0.0068, 1.5, 0.00675),
])
def test_the_best_rate_is_found_wherever_one_starts(start, best, factor, expected):
    def loss(rate, seed):
        return abs(math.log(rate / best)) + 0.01 * seed

    assert sweep.best_rate(loss, start, [1, 2], factor) == expected


def test_a_rate_at_which_one_seed_diverges_is_the_worst():
    def loss(rate, seed):
        if rate > 0.001 and seed == 2:
            return math.inf if rate < 0.003 else math.nan
        return 1 / rate

    assert sweep.best_rate(loss, 0.004, [1, 2]) == 0.001


def test_of_equal_rates_the_first_one_is_kept():
    assert sweep.best_rate(lambda rate, seed: 1.0, 0.002, [1]) == 0.002


@pytest.mark.parametrize("loss", [lambda rate, seed: math.inf, lambda rate, seed: -rate])
def test_a_search_without_an_end_says_so(loss):
    with pytest.raises(UserError, match="no best learning rate"):
        sweep.best_rate(loss, 0.002, [1])


def stub(losses):
    """A train.main that writes the log of a finished run, whose loss is losses(lr, seed)."""

    def main(argv):
        (config,) = train.parse(argv)
        loss = losses(config.lr, config.seed)
        last = dict(step=config.steps, val_loss=loss)
        if math.isinf(loss):
            last = dict(step=1, diverged="val_loss nan")
        head = dict(attn=config.attn, lr=config.lr, seed=config.seed, steps=config.steps)
        config.out.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(head), json.dumps(last)]
        (config.out / "log.jsonl").write_text("\n".join(lines))
        return [loss]

    return main


def test_rows_are_reported_at_their_best_rate_and_on_other_seeds(monkeypatch, tmp_path):
    pd = pytest.importorskip("pandas", reason="needs lab/requirements.txt")

    def losses(lr, seed):
        return math.inf if seed == 5 else abs(math.log2(lr / 0.004)) + seed / 100

    monkeypatch.setattr(train, "main", stub(losses))
    rows = {"a": TINY, "b + c": f"{TINY} --attn=linear"}
    runs = sweep.run_rows(rows, tmp_path, 0.002, [1, 2], [3, 4, 5])
    reported = runs[runs["reported"]]
    assert list(reported["arm"]) == ["a"] * 3 + ["b + c"] * 3
    assert set(reported["lr"]) == {0.004}
    assert list(reported["loss"])[:3] == [0.03, 0.04, math.inf]
    assert set(runs[~runs["reported"]]["seed"]) == {1, 2}

    # the same from the logs alone. A row that is not finished is left out
    again = sweep.run_rows(rows, tmp_path, 0.002, [1, 2], [3, 4, 5], publish=True)
    pd.testing.assert_frame_equal(again, runs)
    log = tmp_path / "b-c-lr0.004-seed4" / "log.jsonl"
    log.write_text(log.read_text().splitlines()[0])
    again = sweep.run_rows(rows, tmp_path, 0.002, [1, 2], [3, 4, 5], publish=True)
    assert set(again["arm"]) == {"a"}
    with pytest.raises(UserError, match="no row"):
        sweep.run_rows({"x": TINY}, tmp_path, 0.002, [1], [2], publish=True)


def test_the_cache_runs_nothing_twice_and_ignores_a_line_that_was_cut(tmp_path):
    made = []

    def make(arm, seed):
        made.append((arm, seed))
        return dict(loss=seed / 2, accuracy={0: 1.0})

    path = tmp_path / "runs.jsonl"
    cache = sweep.Cache(path)
    other = sweep.Cache(path)  # of a second process
    first = cache.run(make, arm="diff", seed=1)
    assert first == dict(arm="diff", seed=1, loss=0.5, accuracy={"0": 1.0})
    other.run(make, arm="diff", seed=2)
    with open(path, "a") as f:
        f.write('{"arm": "diff", "se')  # killed while it wrote
    cache.run(make, arm="diff", seed=3)

    again = sweep.Cache(path)
    assert [row["seed"] for row in again.rows] == [1, 2, 3]
    assert again.run(make, arm="diff", seed=1) == first
    assert made == [("diff", 1), ("diff", 2), ("diff", 3)]


# -----------------------------------------------------------------------------
# text.py


def test_the_rows_of_every_table_can_be_trained_and_compared():
    flags_of = {}
    for name, table in text.TABLES.items():
        assert not set(table.choose_on) & set(table.seeds)  # a loss that chose is not a fair one
        for row, flags in table.rows.items():
            (config,) = train.parse([*table.flags.split(), *flags.split(), "--device=cpu"])
            small = dict(n_layer=1, n_embd=96, block_size=32, subln=config.subln)
            model = GPTConfig(config.attn, n_head=config.n_head, decay=config.decay, **small)
            assert max(compare_forms(model, T=20).values()) < 1e-5
            if name != "gpt2":  # which has its own folder
                assert flags_of.setdefault(row, flags) == flags
        for _, row, base in table.comparisons:
            assert row in table.rows and base in table.rows


def layer(attn, depth=0, **settings):
    return ATTENTION[attn](GPTConfig(attn, n_head=2, n_embd=16, block_size=16, **settings), depth)


@pytest.mark.parametrize("attn", text.ARMS)
def test_a_control_is_loaded_and_sampled(attn):
    config = GPTConfig(attn, n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=32)
    model = GPT(config)
    model.save("ckpt.pt")
    idx = torch.arange(6)[None]
    made = [token.item() for token in GPT.load("ckpt.pt").generate(idx, 8, temperature=0)]
    text_so_far = idx
    for _ in range(8):
        token = model(text_so_far)[0].argmax(-1)  # by all tokens anew
        text_so_far = torch.cat((text_so_far, token), dim=1)
    assert made == text_so_far[0, 6:].tolist()


def test_the_controls_are_what_their_names_say():
    x = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(0))
    for attn in ("diff_v2_minus_matched", "diff_v2_plus_matched"):
        rows = layer(attn).map(x).sum(-1)
        torch.testing.assert_close(rows, torch.ones_like(rows))

    # the token before is half of each token, and nothing comes before the first one
    shifted = text.shift(x)
    assert torch.equal(shifted[:, 1:, 8:], x[:, :-1, 8:])
    assert torch.equal(shifted[..., :8], x[..., :8]) and not shifted[:, 0, 8:].any()

    rate = layer("linear_one_short_head", decay=True).decay_rate(x)
    assert rate.flatten().tolist() == [0.25, 0.0]

    # 1 - lambda_init of layer 1 is 0.6444 (Eq. 3 with l = 2)
    plain = layer("softmax_average", depth=1, subln=True)
    factor = layer("softmax_average_factor", depth=1, subln=True)
    factor.load_state_dict(plain.state_dict())
    torch.testing.assert_close(factor(x), 0.6444909 * plain(x))


def test_a_table_from_the_first_run_to_the_page(monkeypatch, tmp_path):
    pytest.importorskip("pandas", reason="needs lab/requirements.txt")
    rows = {"linear": "--attn=linear", "linear one short head": "--attn=linear_one_short_head"}
    comparisons = [("the control", "linear one short head", "linear"), ("not there", "x", "linear")]
    table = text.TABLES["controls"]._replace(
        flags=TINY, rows=rows, comparisons=comparisons, choose_on=(1,), seeds=(2, 3))
    monkeypatch.setitem(text.TABLES, "controls", table)
    # what two steps reach is chance, and a rate that is best by chance may be as small as you like
    monkeypatch.setattr(
        train, "evaluate", lambda model, val, config, *processes: abs(config.lr - table.lr)
    )
    text.main(["controls", f"--out={tmp_path}"])
    page = (tmp_path / "controls.md").read_text()
    assert "| the control | linear one short head | linear |" in page
    assert "not there" not in page
    runs = json.loads((tmp_path / "controls.json").read_text())["runs"]
    assert {run["arm"] for run in runs} == set(rows)

    monkeypatch.setattr(train, "main", None)  # from here on nothing can be trained
    text.main(["controls", f"--out={tmp_path}", "--publish", "--rows=linear"])
    assert "the control" not in (tmp_path / "controls.md").read_text()
    with pytest.raises(UserError, match="--rows=nope is not a row"):
        text.main(["controls", "--rows=nope"])
