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


def test_intervals_by_hand():
    t_2 = 4.3027  # a quantile of Student's t for 95 %, from a printed table
    # 1, 3 and 5 have the variance 4, and so their mean has 4 / 3
    half = bench.half_interval([1.0, 3.0, 5.0])
    assert half == pytest.approx(t_2 * math.sqrt(4 / 3), rel=1e-4)
    # Welch: the means of 1 and 3 and of 5 and 7 both have 2 / 2. With equal ones the degrees of
    # freedom are 1 + 1
    half = bench.half_interval([1.0, 3.0], [5.0, 7.0])
    assert half == pytest.approx(t_2 * math.sqrt(1 + 1), rel=1e-4)
    # one run says nothing of the noise, and those that are left don't stand for one that diverged
    assert bench.half_interval([1.0, 3.0], [1.0]) is None
    assert bench.half_interval([1.0, math.inf]) is None


def fake_run(name, attn="softmax", seed=1, loss=2.0, reached=100, **settings):
    """The log of a run of 100 steps of 10 tokens. inf: it diverged. reached: it was stopped."""
    head = dict.fromkeys(bench.SETTINGS) | dict(attn=attn, seed=seed, tokenizer="bytes")
    head |= dict(steps=100, total_batch=10, lr=1e-3) | settings
    half = dict(step=reached // 2, val_loss=4.0)
    last = dict(diverged="val_loss nan") if loss == math.inf else dict(val_loss=loss)
    write_log(name, head, half, last | dict(step=reached))


def write_log(name, *records):
    Path("runs", name).mkdir(parents=True)
    Path("runs", name, "log.jsonl").write_text("\n".join(map(json.dumps, records)))


def compare():
    """What bench.py says of the runs: {label: row}, and {folder: why it was left out}."""
    table, *more = bench.main(["loss", "runs", "--out=results"]).values()
    left_out = {row["folder"]: row["reason"] for rows in more for row in rows}
    return {row["arm"]: row for row in table}, left_out


def refusal():
    with pytest.raises(UserError) as e:
        compare()
    return str(e.value)


def test_only_seeds_are_pooled(capsys):
    for seed, a, b in [(1, 1.0, 5.0), (2, 3.0, 7.0)]:
        fake_run(f"a {seed}", "my arm", seed, a, batch_size=seed)  # changes the speed alone
        fake_run(f"b {seed}", "diff", seed, b)
        fake_run(f"c {seed}", "softmax", seed, a)
    fake_run("d-seed2", lr=2e-3)  # a folder's name says nothing
    fake_run("e", "diff", subln=False)
    rows, left_out = compare()
    base, *rest = rows
    assert base == "softmax lr=0.001"  # the rows are in the order of ATTENTION
    assert rest[:2] == ["softmax lr=0.002", "diff lr=0.001"]
    assert rest[2:] == ["diff subln=False lr=0.001", "my arm lr=0.001"]
    assert [row["n"] for row in rows.values()] == [2, 1, 2, 1, 2]
    assert rows[base]["val loss"] == 2
    assert rows[base]["±"] == pytest.approx(12.706, rel=1e-4)
    assert rows["diff lr=0.001"][f"− {base}"] == 4
    assert rows["diff lr=0.001"]["± (Welch)"] == pytest.approx(6.085, rel=1e-4)  # as by hand above
    assert not left_out
    assert Path("results/loss.png").read_bytes().startswith(b"\x89PNG")
    text = Path("results/loss.md").read_text()
    assert "| my arm lr=0.001           | 2   | 2.000    |" in text and "- seed: 1, 2" in text
    assert text in capsys.readouterr().out


@pytest.mark.parametrize("name", bench.SHARED)
def test_runs_that_differ_in_more_than_the_arm_are_refused(name):
    different = dict(steps=2, reached=2) if name == "tokens" else {name: 77}
    fake_run("a trial", **different)  # a softmax like the other, but no copy of it
    fake_run("b")
    values = "20 and 1000" if name == "tokens" else "77 and "
    assert f"runs/a trial and runs/b can't be compared: {name} is {values}" in refusal()


def test_copies_count_once():
    fake_run("a")
    fake_run("b", eval_every=7)
    fake_run("c", seed=2)
    rows, left_out = compare()
    assert rows["softmax"]["n"] == 2
    assert left_out == {"runs/b": "a copy of runs/a"}
    fake_run("d", loss=2.5)  # something differs that no log tells
    assert "runs/a and runs/d can't be compared: loss is 2.0 and 2.5" in refusal()


def test_a_run_that_diverged_is_the_worst():
    fake_run("a", loss=3.0)
    fake_run("b1", "diff", seed=1, loss=1.0)
    fake_run("b2", "diff", seed=2, loss=math.inf, reached=60)
    row = compare()[0]["diff"]
    assert row["val loss"] == row["− softmax"] == math.inf
    assert row["±"] is None and row["± (Welch)"] is None


def test_logs_without_a_final_loss_are_named():
    assert refusal().startswith("there are no runs below runs")
    fake_run("stopped", reached=60)
    assert refusal() == "no run has ended. runs/stopped: stopped at step 60 of 100"
    fake_run("fine")
    write_log("empty")
    write_log("foreign", dict(step=1, loss=2), dict(step=2, loss=1))
    head = json.loads(Path("runs/fine/log.jsonl").read_text().splitlines()[0])
    write_log("lost", head, dict(step=head["steps"]))  # the end was not evaluated: it is no inf
    assert list(compare()[1]) == ["runs/empty", "runs/foreign", "runs/lost", "runs/stopped"]


# ---- speed and decode


def make_configs(*arms):
    return [bench.train.Config(attn=arm, device=torch.device("cpu")) for arm in arms]


def test_functions_are_timed_in_turn():
    called = []

    def build(config):
        def work():
            called.append(config.attn)
            time.sleep(0.01 if config.attn == "softmax" else 0.02)
            if config.attn == "linear" and called.count("diff") > 0:
                raise RuntimeError("no such card\nand more")

        if config.attn == "diff_linear":
            raise bench.ModelError("no kernel")
        return work, 5, {"bytes": 7}

    configs = make_configs("softmax", "diff_linear", "linear", "diff")
    _, diff_linear, linear, diff = bench.time_arms(build, configs, repeats=3)
    turns = [arm for i, arm in enumerate(called) if i == 0 or called[i - 1] != arm]
    assert turns == 2 * ["softmax", "linear", "diff"] + 2 * ["softmax", "diff"]
    assert diff_linear["error"] == "ModelError: no kernel"
    assert linear["error"] == "RuntimeError: no such card"
    assert diff["tokens/s"] < 250 and diff["bytes"] == 7

    with pytest.raises(ZeroDivisionError):  # a mistake in the code keeps its traceback
        bench.time_arms(lambda config: 1 / 0, configs, repeats=1)


def test_ratios_are_taken_within_a_round(monkeypatch):
    """The second round is slow for both arms: the ratio does not see it."""
    # the first time of each is the warm-up's
    times = dict(softmax=iter([9.0, 1.0, 10.0, 0.5]), diff=iter([9.0, 2.0, 20.0, 4.0]))
    monkeypatch.setattr(bench, "seconds", lambda arm: next(times[arm]))
    configs = make_configs("softmax", "diff")
    _, row = bench.time_arms(lambda config: (config.attn, 40, {}), configs, repeats=3)
    assert row["tokens/s"] == 10
    assert (row["lowest"], row["× softmax"], row["highest"]) == (0.125, 0.5, 0.5)


@pytest.mark.parametrize("verb, parts", [("speed", 2), ("decode", 1)])
def test_every_arm_is_timed(verb, parts, monkeypatch):
    size = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=2)
    monkeypatch.setitem(bench.train.PRESETS, "toy", bench.train.PRESETS["toy"] | size)
    flags = ["--preset=toy", "--T=16,32", "--repeats=1", "--decay", "--out=results"]
    tables = bench.main([verb, *flags]).values()
    assert len(tables) == parts
    for table in tables:
        assert [row["arm"] for row in table] == 2 * list(ATTENTION)
        assert all(row["tokens/s"] > 0 for row in table)
        assert bench.markdown(table) in Path(f"results/{verb}.md").read_text()
    if verb == "decode":
        state = [row["bytes of state"] for row in table if row["arm"] == "softmax"]
        assert state == [4 * 2 * 16 * 32, 4 * 2 * 32 * 32]  # T keys and values of 32 channels
