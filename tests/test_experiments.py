"""What the experiments share, the tables of text, and what is read out of checkpoints."""
import json
import math

import pandas as pd
import pytest
import torch

import train
from experiments import checkpoints, sweep, text
from model import ATTENTION, GPT, GPTConfig

torch.set_num_threads(1)

# flags of a run of a second
TINY = "--preset=toy --device=cpu --n_layer=1 --n_embd=16 --n_head=2 --block_size=16 "
TINY += "--batch_size=2 --steps=2 --eval_tokens=64"


@pytest.fixture(autouse=True)
def the_arms_of_text(monkeypatch):
    """ATTENTION has the controls in these tests, and not after them."""
    for name, cls in text.ARMS.items():
        monkeypatch.setitem(ATTENTION, name, cls)


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
    with pytest.raises(ValueError, match="no best learning rate"):
        sweep.best_rate(loss, 0.002, [1])


def test_a_restart_makes_the_choice_of_an_uninterrupted_run():
    made = []

    def loss(rate, seed):
        made.append((rate, seed))
        return abs(math.log(rate / 0.011)) * (1 + 0.1 * seed)

    best = sweep.best_rate(loss, 0.003, [1, 2], 1.5)
    for stop in range(len(made)):
        known = dict.fromkeys(made[:stop])
        again = []

        def resumed(rate, seed):
            again.append((rate, seed))
            return abs(math.log(rate / 0.011)) * (1 + 0.1 * seed)

        assert sweep.best_rate(resumed, 0.003, [1, 2], 1.5) == best
        assert again[:stop] == list(known)  # so a finished run is not made with another rate


def stub(losses):
    """A train.main that writes the log of a finished run, whose loss is losses(lr, seed)."""

    def main(argv):
        config = train.parse(argv)[0]
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
    with pytest.raises(ValueError, match="no row"):
        sweep.run_rows({"x": TINY}, tmp_path, 0.002, [1], [2], publish=True)


def test_the_seeds_that_choose_are_never_reported(tmp_path):
    with pytest.raises(AssertionError):
        sweep.run_rows({"a": TINY}, tmp_path, 0.002, [1, 2], [2, 3])
    for table in text.TABLES.values():
        assert not set(table.choose_on) & set(table.seeds)


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


# text.py


def test_the_rows_of_every_table_can_be_trained_and_compared():
    flags_of = {}
    for name, table in text.TABLES.items():
        for row, flags in table.rows.items():
            configs = train.parse([*table.flags.split(), *flags.split(), "--device=cpu"])
            assert len(configs) == 1
            if name != "gpt2":  # which has its own folder
                assert flags_of.setdefault(row, flags) == flags
        for _, row, base in table.comparisons:
            assert row in table.rows and base in table.rows


@pytest.mark.parametrize("attn", text.ARMS)
def test_the_forms_of_the_controls_agree(attn):
    config = GPTConfig(attn, 64, 32, n_layer=2, n_head=2, n_embd=16, decay=True, subln=True)
    layer = GPT(config).double().blocks[1].attn
    by_map = GPT(config, seed=None)
    by_map.config.flash = False
    by_map = ATTENTION[attn](by_map.config, 1).double()
    by_map.load_state_dict(layer.state_dict())
    layer.config = GPTConfig(**{**vars(config), "flash": True})
    x = torch.randn(2, 70, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x), by_map(x))


def test_the_controls_are_what_their_names_say():
    x = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(0))
    small = dict(block_size=16, vocab_size=32, n_layer=1, n_head=2, n_embd=16)
    for attn in ("diff_v2_minus_matched", "diff_v2_plus_matched"):
        rows = ATTENTION[attn](GPTConfig(attn, **small), 0).map(x).sum(-1)
        torch.testing.assert_close(rows, torch.ones_like(rows))

    # the token before is half of each token, and nothing comes before the first one
    shifted = text.shift(x)
    assert torch.equal(shifted[:, 1:, 8:], x[:, :-1, 8:])
    assert torch.equal(shifted[..., :8], x[..., :8]) and not shifted[:, 0, 8:].any()

    layer = ATTENTION["linear_one_short_head"](GPTConfig("linear", decay=True, **small), 0)
    assert layer.decay_rate("cpu", torch.float32).flatten().tolist() == [0.25, 0.0]

    # 1 - lambda_init of layer 1 is 0.6444 (Eq. 3 with l = 2)
    config = GPTConfig("softmax", subln=True, **small)
    plain = ATTENTION["softmax"](config, 1)
    factor = ATTENTION["softmax_factor"](config, 1)
    factor.load_state_dict(plain.state_dict())
    torch.testing.assert_close(factor(x), 0.6444909 * plain(x))


def test_a_table_from_the_first_run_to_the_page(monkeypatch, tmp_path):
    rows = {"linear": "--attn=linear", "linear one short head": "--attn=linear_one_short_head"}
    comparisons = [("the control", "linear one short head", "linear"), ("not there", "x", "linear")]
    table = text.TABLES["controls"]._replace(
        flags=TINY, rows=rows, comparisons=comparisons, choose_on=(1,), seeds=(2, 3))
    monkeypatch.setitem(text.TABLES, "controls", table)
    # what two steps reach is chance, and a rate that is best by chance may be as small as you like
    best = table.lr
    monkeypatch.setattr(train, "evaluate", lambda model, val, config: abs(config.lr - best))
    text.main(["controls", f"--out={tmp_path}"])
    page = (tmp_path / "controls.md").read_text()
    assert "| the control | linear one short head | linear |" in page
    assert "not there" not in page
    runs = json.loads((tmp_path / "controls.json").read_text())["runs"]
    assert {run["arm"] for run in runs} == set(rows)

    monkeypatch.setattr(train, "main", None)  # from here on nothing can be trained
    text.main(["controls", f"--out={tmp_path}", "--publish", "--rows=linear"])
    assert "the control" not in (tmp_path / "controls.md").read_text()
    with pytest.raises(ValueError, match="--rows=nope is not a row"):
        text.main(["controls", "--rows=nope"])


# checkpoints.py


def test_scores_are_rounded_to_equal_steps():
    scores = torch.tensor([[7.0, 99.0], [-2.4, 3.6]])[None, None]  # 99 is in the future
    rounded = checkpoints.round_scores(scores, bits=4)  # 7 steps of 1 on either side of 0
    assert rounded[0, 0].tril().tolist() == [[7.0, 0.0], [-2.0, 4.0]]
    rounded = checkpoints.round_scores(scores, bits=2)  # 1 step of 7
    assert rounded[0, 0].tril().tolist() == [[7.0, 0.0], [0.0, 7.0]]


def test_the_largest_values_come_in_their_order():
    extremes = checkpoints.Extremes()
    extremes.add(torch.tensor([[1.0, -5.0], [2.0, 0.0]]))
    extremes.add(torch.arange(98.0))
    found = extremes.row()
    assert [found["top 1"], found["top 2"], found["top 10"]] == [97.0, 96.0, 88.0]
    assert found["top 100"] == 1.0  # of 102 values, the last two are 0
    assert found["median"] == 0.0  # of the sample, the first value of each tensor


def test_a_map_in_numbers():
    A = torch.tensor([[[1.0, 0.0], [-0.5, 1.5]]])  # one head
    found = checkpoints.describe_map(A)
    expected = {"sum of a row": 1.0, "negative": 0.5 / 3, "on the first token": 0.625}
    assert found == pytest.approx(expected | {"on the token before": 0.25})


@pytest.mark.parametrize("attn", ["softmax", "diff", "diff_v2", "linear", "diff_linear"])
def test_changed_scores_are_what_the_copy_uses(attn):
    model = GPT(GPTConfig(attn, 32, 32, n_layer=2, n_head=2, n_embd=16)).eval()
    idx = torch.randint(32, (2, 20), generator=torch.Generator().manual_seed(0))
    seen = []
    same = checkpoints.with_scores(model, lambda S: seen.append(S.shape) or S)
    torch.testing.assert_close(same(idx)[0], model(idx)[0])
    assert len(seen) == 2 and seen[0][-2:] == (20, 20)
    other = checkpoints.with_scores(model, lambda S: 0.5 * S)
    assert not torch.allclose(other(idx)[0], model(idx)[0])

    # the maps are those of the layers, and the third is made of the first two
    for block, of_layer in zip(model.blocks, checkpoints.attention_maps(model, idx[:1])):
        *parts, A = of_layer.values()
        assert A.shape == (block.attn.n_value_head, 20, 20)
        if attn in ("diff", "diff_linear"):
            lam = block.attn.lambda_full()
            torch.testing.assert_close(A, parts[0] - lam * parts[1])


def test_a_page_of_a_first_run(tmp_path, capsys):
    """The newest run is found without a flag, and two seeds of an arm are one row of the table."""
    train.main(f"{TINY} --attn=diff --seed=1,2".split())
    checkpoints.main(["maps", "--text=one, two"])
    page = (tmp_path / "out/checkpoints/maps.md").read_text()
    assert "| diff" in page and "head" in page
    assert "seed 2" in capsys.readouterr().err

    folders = sorted(tmp_path.glob("out/diff*"))
    checkpoints.main(["outliers", "--tokens=64", "--ckpt", *map(str, folders)])
    result = json.loads((tmp_path / "out/checkpoints/outliers.json").read_text())
    exact = [run["exact"] for run in result["runs"]]
    logs = [train.read_log(folder / "log.jsonl")[1] for folder in folders]
    assert exact == pytest.approx([records[-1]["val_loss"] for records in logs], abs=1e-4)


def test_an_arm_with_two_rates_is_two_arms(tmp_path):
    train.main(f"{TINY} --attn=linear --lr=1e-3,2e-3 --seed=3,4".split())
    found = checkpoints.open_checkpoints(sorted(tmp_path.glob("out/*")), "cpu")
    assert [c.arm.split()[1:] for c in found] == [["lr", "0.001"]] * 2 + [["lr", "0.002"]] * 2
    found = checkpoints.open_checkpoints(sorted(tmp_path.glob("out/*lr1e-3*")), "cpu")
    assert {c.arm for c in found} == {found[0].run["arm"]}


@pytest.mark.parametrize("flags", ["maps", "maps --ckpt=x", "maps --text=a", "maps --layer=9",
                                   "maps --head=9", "outliers --tokens=3"])
def test_wrong_flags_end_in_a_sentence(flags):
    if flags not in ("maps", "maps --ckpt=x"):  # these two are without a checkpoint
        train.main(f"{TINY} --out=out/run".split())
    with pytest.raises((ValueError, OSError)) as error:
        checkpoints.main(flags.split())
    assert "\n" not in str(error.value)
