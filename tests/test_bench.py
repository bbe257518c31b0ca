"""bench.py: the statistics by hand, what is pooled and what is refused, and the timings."""
import json
import math
import time
from pathlib import Path

import pytest
import torch

import bench
from common import UserError
from model import ATTENTION

torch.set_num_threads(1)  # on tensors this small, threads only wait for one another

INF = math.inf

# -----------------------------------------------------------------------------
# loss


def test_intervals_by_hand():
    # quantiles of Student's t for 95 %, from a printed table
    t_1 = 12.706
    t_2 = 4.3027
    # 1, 3 and 5 have the variance 4, and so their mean has 4 / 3
    half = bench.half_interval([1.0, 3.0, 5.0])
    assert half == pytest.approx(t_2 * math.sqrt(4 / 3), rel=1e-4)
    # Welch: the means of 1 and 3 and of 5 and 7 both have 2 / 2. With equal ones the degrees of freedom are 1 + 1
    half = bench.half_interval([1.0, 3.0], [5.0, 7.0])
    assert half == pytest.approx(t_2 * math.sqrt(1 + 1), rel=1e-4)
    # if all of the noise is in one of them, they are that one's
    half = bench.half_interval([1.0, 3.0], [5.0, 5.0, 5.0])
    assert half == pytest.approx(t_1 * 1, rel=1e-4)
    assert bench.half_interval([2.0, 2.0]) == 0
    # one run says nothing of the noise, and those that are left don't stand for one that diverged
    assert bench.half_interval([1.0, 3.0], [1.0]) is None
    assert bench.half_interval([1.0, INF]) is None


def test_a_table_for_terminal_and_page():
    rows = [{"arm": "a|b", "n": 3, "tok/s": 1234.5}, {"arm": "c", "n": 10_000, "±": None}]
    assert bench.markdown(rows).splitlines() == [
        "| arm  |      n | tok/s | ±   |",
        "| ---- | -----: | ----: | --- |",
        "| a\\|b |      3 | 1,234 |     |",
        "| c    | 10,000 |       | –   |",
    ]
    cells = [bench.cell(x) for x in (3.2, 0.000123456, INF, -0.5, 1e6)]
    assert cells == ["3.200", "0.0001235", "inf", "-0.5000", "1,000,000"]


def fake_run(name, attn="softmax", seed=1, loss=2.0, reached=100, **settings):
    """The log of a run of 100 steps of 10 tokens. inf: it diverged. reached: it was stopped."""
    head = dict.fromkeys(bench.SETTINGS) | dict(attn=attn, seed=seed, tokenizer="bytes")
    head |= dict(steps=100, total_batch=10, lr=1e-3) | settings
    half = dict(step=reached // 2, val_loss=4.0, tok_per_s=100.0)
    last = dict(step=reached, val_loss=loss, tok_per_s=300.0)
    if loss == INF:
        last = dict(step=reached, diverged="val_loss nan")
    write_log(name, *[json.dumps(record) for record in (head, half, last)])


def write_log(name, *lines):
    Path("runs", name).mkdir(parents=True)
    Path("runs", name, "log.jsonl").write_text("".join(line + "\n" for line in lines))


def compare(folder="runs"):
    """What bench.py says of the runs: {label: row}, and {folder: why it was left out}."""
    bench.main(["loss", folder, "--out=results"])
    tables = list(json.loads(Path("results/loss.json").read_text())["tables"].values())
    left_out = {row["folder"]: row["reason"] for table in tables[1:] for row in table}
    return {row["arm"]: row for row in tables[0]}, left_out


def refusal():
    with pytest.raises(UserError) as e:
        compare()
    return str(e.value)


def test_seeds_are_pooled(capsys):
    for seed, a, b in [(1, 1.0, 5.0), (2, 3.0, 7.0)]:
        fake_run(f"b{seed}", "diff", seed, b)
        fake_run(f"with spaces {seed}", "softmax", seed, a)
    rows, left_out = compare()
    assert list(rows) == ["softmax", "diff"]  # in the order of ATTENTION
    assert rows["softmax"]["val loss"] == 2
    assert rows["softmax"]["±"] == pytest.approx(12.706, rel=1e-4)
    assert rows["diff"]["n"] == 2
    assert rows["diff"]["tok/s"] == 200
    assert rows["diff"]["− softmax"] == 4
    assert rows["diff"]["± (Welch)"] == pytest.approx(6.085, rel=1e-4)  # as by hand above
    assert not left_out
    assert Path("results/loss.png").read_bytes().startswith(b"\x89PNG")
    text = Path("results/loss.md").read_text()
    assert "| diff    |   2 |" in text and "- seed: 1, 2" in text
    assert "python bench.py loss runs --out=results" in text
    assert text in capsys.readouterr().out


def test_only_seeds_are_pooled():
    fake_run("softmax-seed1", lr=1e-3)  # a folder's name says nothing
    fake_run("softmax-seed2", lr=2e-3)
    fake_run("a", "diff", subln=False)
    fake_run("b", "diff", weight_decay=1e-3)
    fake_run("c", "diff", weight_decay=1e-4)
    fake_run("d", "my arm", seed=2, batch_size=4)
    fake_run("e", "my arm", seed=3, batch_size=8)  # changes the speed alone
    rows, _ = compare()
    assert list(rows) == [
        "softmax lr=0.001",
        "softmax lr=0.002",
        "diff lr=0.001 weight_decay=0.0001",
        "diff lr=0.001 weight_decay=0.001",
        "diff subln=False lr=0.001",
        "my arm lr=0.001",
    ]
    assert rows["my arm lr=0.001"]["n"] == 2


@pytest.mark.parametrize(
    "name", ["data_sha256", "tokenizer", "tokens", "block_size", "eval_tokens", "dtype"]
)
def test_runs_that_differ_in_more_than_the_arm_are_refused(name):
    different = dict(steps=2, reached=2) if name == "tokens" else {name: 77}
    fake_run("a trial", **different)  # a softmax like the other, but no copy of it
    fake_run("b")
    values = "20 and 1000" if name == "tokens" else "77 and "
    assert f"runs/a trial and runs/b can't be compared: {name} is {values}" in refusal()


def test_as_many_tokens_in_other_steps_can_be_compared():
    fake_run("a", steps=50, total_batch=20, reached=50)
    fake_run("b")
    rows, _ = compare()
    assert list(rows) == ["softmax total_batch=10 steps=100", "softmax total_batch=20 steps=50"]


def test_copies_count_once():
    fake_run("a")
    fake_run("b", eval_every=7)
    fake_run("c", seed=2)
    rows, left_out = compare()
    assert rows["softmax"]["n"] == 2
    assert left_out == {"runs/b": "a copy of runs/a"}
    fake_run("d", loss=2.5)  # something differs that no log tells
    assert "runs/a and runs/d have the same settings and seed, but ended at 2.0" in refusal()


def test_a_run_that_diverged_is_the_worst():
    fake_run("a1", seed=1, loss=3.0)
    fake_run("a2", seed=2, loss=4.0)
    fake_run("b1", "diff", seed=1, loss=1.0)
    fake_run("b2", "diff", seed=2, loss=INF, reached=60)
    fake_run("c", "linear", loss=math.nan)
    rows, _ = compare()
    for label in ("diff", "linear"):
        assert rows[label]["val loss"] == rows[label]["− softmax"] == INF
        assert rows[label]["±"] is None and rows[label]["± (Welch)"] is None


def test_logs_without_a_final_loss_are_named():
    assert refusal().startswith("there are no runs below runs: `python train.py")
    fake_run("stopped", reached=60)
    write_log("empty")
    write_log("cut", '{"attn": "softmax", "se')
    write_log("list", "[1, 2]", "[3]")
    write_log("foreign", '{"step": 1, "loss": 2}', '{"step": 2, "loss": 1}')
    fake_run("head only")
    log = Path("runs/head only/log.jsonl")
    log.write_text(log.read_text().split("\n")[0])
    write_log("junk")
    Path("runs/junk/log.jsonl").write_bytes(bytes(range(256)))
    no_log = "no step in the log, or it is not one of train.py"
    assert refusal() == f"no run has ended. runs/cut: {no_log}"

    fake_run("fine")
    rows, left_out = compare()
    assert rows["softmax"]["n"] == 1
    assert left_out.pop("runs/stopped") == "stopped at step 60 of 100"
    assert left_out == {f"runs/{name}": no_log for name in
                        ("cut", "empty", "foreign", "head only", "junk", "list")}


# -----------------------------------------------------------------------------
# speed and decode


def make_configs(*arms):
    return [bench.train.Config(attn=arm, device=torch.device("cpu")) for arm in arms]


def test_functions_are_timed_in_turn():
    called = []

    def build(config):
        def work():
            called.append(config.attn)
            time.sleep(0.01 if config.attn == "softmax" else 0.02)
            if config.attn == "linear" and len(called) > 20:
                raise RuntimeError("no such card\nand more")

        if config.attn == "diff_linear":
            raise bench.ModelError("no kernel")
        return work, 5, {"bytes": 7}

    configs = make_configs("softmax", "diff_linear", "linear", "diff")
    _, diff_linear, linear, diff = bench.time_arms(build, configs, repeats=3)
    turns = [arm for i, arm in enumerate(called) if i == 0 or called[i - 1] != arm]
    assert turns == 2 * ["softmax", "linear", "diff"] + 2 * ["softmax", "diff"]
    assert diff_linear["error"] == "no kernel"
    assert linear["error"] == "no such card"
    assert diff["tokens/s"] < 250 and diff["bytes"] == 7

    with pytest.raises(ZeroDivisionError):  # a mistake in the code keeps its traceback
        bench.time_arms(lambda config: 1 / 0, configs, repeats=1)


def test_ratios_are_taken_within_a_round(monkeypatch):
    """The second round is slow for both arms: the ratio does not see it."""
    speeds = dict(softmax=iter([40.0, 4.0, 80.0]), diff=iter([20.0, 2.0, 10.0]))

    def warm_up(build, config):
        return lambda: next(speeds[config.attn]), {"full speed": 40.0}

    monkeypatch.setattr(bench, "warm_up", warm_up)
    _, row = bench.time_arms(None, make_configs("softmax", "diff"), repeats=3)
    assert row["tokens/s"] == 10
    assert (row["Q1"], row["× softmax"], row["Q3"]) == (0.3125, 0.5, 0.5)
    assert row["MFU"] == 0.25


def timed(verb, monkeypatch, *flags):
    """The tables of a tiny model."""
    size = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=2)
    monkeypatch.setitem(bench.train.PRESETS, "toy", bench.train.PRESETS["toy"] | size)
    bench.main([verb, "--preset=toy", "--T=16,32", "--repeats=2", "--out=results", *flags])
    return list(json.loads(Path(f"results/{verb}.json").read_text())["tables"].values())


@pytest.mark.parametrize("verb, parts", [("speed", 2), ("decode", 1)])
def test_every_arm_is_timed(verb, parts, monkeypatch, capsys):
    tables = timed(verb, monkeypatch, "--decay")
    text = Path(f"results/{verb}.md").read_text()
    assert "- decay: True" in text and text in capsys.readouterr().out
    assert len(tables) == parts
    for table in tables:
        assert [row["arm"] for row in table] == 2 * list(ATTENTION)
        assert all(row["tokens/s"] > 0 for row in table)
        assert bench.markdown(table) in text
    if verb == "decode":
        size = {row["arm"]: row["bytes of state"] for row in table if row["T"] == 16}
        assert size["softmax"] == size["diff"] == 4 * 2 * 16 * 32  # keys and values, 32 channels
        assert size["linear"] == 4 * (32 * 16 + 32)  # 16 x 16 for each of two heads, and key sums
        assert size["diff_linear"] == 4 * (2 * 32 * 16 + 32)  # twice as many features


def test_what_can_not_be_timed(monkeypatch):
    class Broken(ATTENTION["softmax"]):
        def __init__(self, config, depth):
            raise RuntimeError("out of memory\nTried to allocate")

    monkeypatch.setitem(ATTENTION, "broken", Broken)
    [table] = timed("decode", monkeypatch, "--arms=softmax,broken")
    assert [row.get("error") for row in table] == 2 * [None, "out of memory"]
    with pytest.raises(UserError, match="nothing could be timed. broken: out of memory"):
        timed("decode", monkeypatch, "--arms=broken")
    with pytest.raises(bench.ModelError, match="attn must be one of"):
        timed("decode", monkeypatch, "--arms=softmax,nosuch")
    monkeypatch.setattr(bench, "time_arms", None)  # what can't be written is not timed at all
    with pytest.raises(OSError):
        timed("speed", monkeypatch, "--out=results/decode.md")
