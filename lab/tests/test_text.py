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


@pytest.mark.parametrize("start", [0.001, 0.004, 0.032])
def test_the_best_rate_is_found_wherever_one_starts(start):
    def loss(rate, seed):
        if rate > 0.01 and seed == 2:
            return math.inf  # a rate at which one seed diverges is the worst
        return abs(math.log(rate / 0.004)) + 0.01 * seed

    assert sweep.best_rate(loss, start, [1, 2]) == 0.004
    with pytest.raises(UserError, match="no best learning rate"):
        sweep.best_rate(lambda rate, seed: math.inf, 0.002, [1])


def test_the_cache_runs_nothing_twice_and_ignores_a_line_that_was_cut(tmp_path):
    made = []

    def make(arm, seed):
        made.append((arm, seed))
        return dict(loss=seed / 2, accuracy={0: 1.0})

    path = tmp_path / "runs.jsonl"
    cache = sweep.Cache(path)
    first = cache.run(make, arm="diff", seed=1)
    assert first == dict(arm="diff", seed=1, loss=0.5, accuracy={"0": 1.0})
    with open(path, "a") as f:
        f.write('{"arm": "diff", "se')  # killed while it wrote
    cache.run(make, arm="diff", seed=2)

    again = sweep.Cache(path)
    assert [row["seed"] for row in again.rows] == [1, 2]
    assert again.run(make, arm="diff", seed=1) == first
    assert made == [("diff", 1), ("diff", 2)]


def test_the_rows_of_every_table_can_be_trained():
    for table in text.TABLES.values():
        assert not set(table.choose_on) & set(table.seeds)  # a loss that chose is not a fair one
        rows = table.rows or text.rows_of(table.comparisons)
        for flags in rows.values():
            (config,) = train.parse([*table.flags.split(), *flags.split(), "--device=cpu"])
            small = dict(n_layer=1, n_embd=96, block_size=32, subln=config.subln)
            model = GPTConfig(config.attn, n_head=config.n_head, decay=config.decay, **small)
            assert max(compare_forms(model).values()) < 1e-5
        for _, row, base in table.comparisons:
            assert row in rows and base in rows


def layer(attn, depth=0, **settings):
    return ATTENTION[attn](GPTConfig(attn, n_head=2, n_embd=16, block_size=16, **settings), depth)


@pytest.mark.parametrize("attn", ["linear_shift", "softmax_average_factor"])
def test_a_control_is_loaded_and_sampled(attn):
    model = GPT(GPTConfig(attn, n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=32))
    model.save("ckpt.pt")
    idx = torch.arange(6)[None]
    for token in GPT.load("ckpt.pt").generate(idx, 8, temperature=0):
        assert token == model(idx)[0].argmax()  # by all tokens anew
        idx = torch.cat((idx, token[:, None]), dim=1)


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
    comparisons = [("the control", "linear one short head", "linear")]
    table = text.Table("Controls", comparisons, TINY, choose_on=(1,), seeds=(2, 3))
    monkeypatch.setitem(text.TABLES, "controls", table)
    # what two steps reach is chance, and a rate that is best by chance may be as small as you like
    monkeypatch.setattr(train, "evaluate", lambda model, val, config, *_: abs(config.lr - 4e-3))
    text.main(["controls", f"--out={tmp_path}"])
    page = (tmp_path / "controls.md").read_text()
    assert "| the control | linear one short head | linear |" in page
    runs = json.loads((tmp_path / "controls.json").read_text())["runs"]
    for arm in ("linear", "linear one short head"):
        of_arm = [run for run in runs if run["arm"] == arm]
        assert {run["lr"] for run in of_arm if run["seed"] == 1} == {1e-3, 2e-3, 4e-3, 8e-3}
        reported = [(run["lr"], run["seed"]) for run in of_arm if run["reported"]]
        assert reported == [(4e-3, 2), (4e-3, 3)]

    # the same from the logs alone, where a row that is not finished is left out
    monkeypatch.setattr(train, "main", None)
    text.main(["controls", f"--out={tmp_path}", "--publish"])
    assert json.loads((tmp_path / "controls.json").read_text())["runs"] == runs
    log = tmp_path / "linear-one-short-head-lr0.004-seed3" / "log.jsonl"
    log.write_text(log.read_text().splitlines()[0])
    text.main(["controls", f"--out={tmp_path}", "--publish"])
    assert "the control" not in (tmp_path / "controls.md").read_text()
    with pytest.raises(UserError, match="--rows=nope is not a row"):
        text.main(["controls", "--rows=nope"])
