"""report.py and bench.py: the statistics by hand, what is published, and the three verbs."""
import json
import math
from pathlib import Path

import pandas as pd
import pytest
import torch

import bench
import report
from model import ATTENTION

torch.set_num_threads(1)  # on tensors this small, threads only wait for one another

# quantiles of Student's t for 95 %, from a printed table
T_1 = 12.706
T_2 = 4.3027

INF = math.inf
RUNS = pd.DataFrame(dict(arm=list("aabbcdd"), loss=[1.0, 3.0, 5.0, 7.0, 4.0, INF, 2.0]))


def by_arm(table):
    return {row["arm"]: row for row in table.to_dict("records")}


def test_means_by_hand():
    rows = by_arm(report.means(RUNS))
    assert [row["n"] for row in rows.values()] == [2, 2, 1, 2]
    # the sd of 1 and 3 is sqrt(2), and that of their mean sqrt(2) / sqrt(2)
    assert rows["a"]["mean"] == 2
    assert rows["a"]["high"] - 2 == pytest.approx(T_1 * 1, rel=1e-4)
    assert rows["c"]["mean"] == 4
    assert math.isnan(rows["c"]["low"])  # one run says nothing of the noise
    assert rows["d"]["mean"] == INF  # and the run that is left does not stand for the arm


def test_differences_by_hand():
    table = report.compare(RUNS, [("b", "a"), ("c", "a"), ("d", "a"), ("d", "d")])
    b, c, d, same = table.to_dict("records")
    # Welch: both means have a variance of 1. With equal ones the degrees of freedom are 1 + 1
    assert (b["arm"], b["base"], b["difference"]) == ("b", "a", 4)
    assert b["high"] - 4 == pytest.approx(T_2 * math.sqrt(1 + 1), rel=1e-4)
    assert b["low"] == pytest.approx(4 - T_2 * math.sqrt(2), rel=1e-4)
    assert c["difference"] == 2 and math.isnan(c["low"])
    assert d["difference"] == INF
    assert math.isnan(same["difference"])  # inf - inf


def test_an_interval_is_written_with_the_digits_that_it_needs():
    rows = [(0.03144, 0.0099), (0.03144, 0.00012), (2.5, math.nan), (INF, math.nan)]
    table = pd.DataFrame([dict(mean=m, low=m - half, high=m + half) for m, half in rows])
    cells = report.plus_minus(table, "mean")["mean"].tolist()
    assert cells == ["0.031 ± 0.010", "0.0314 ± 0.0001", "2.500", "inf"]


def test_the_data_of_a_page_give_its_tables_again():
    tables = {"Losses": report.plus_minus(report.means(RUNS), "mean")}
    rows = RUNS.assign(path=Path("x")).to_dict("records")
    figure, (ax,) = report.new_figure()
    report.dots(ax, RUNS, report.means(RUNS))
    conditions = dict(steps=5, machine="a card")
    report.publish("new/out", "x", "A title", tables, rows, conditions, figure, "python x.py")

    text = Path("new/out/x.md").read_text()
    result = json.loads(Path("new/out/x.json").read_text())
    again = report.plus_minus(report.means(pd.DataFrame(result["runs"])), "mean")
    assert report.to_markdown(again) in text
    assert "| d | 2 | inf |" in text
    assert result["machine"] == "a card" and result["command"] == "python x.py"
    assert {"commit", "date"} <= result.keys()
    assert Path("new/out/x.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_for_each_run_and_one_for_their_mean():
    df = pd.DataFrame([(1, 0, 1.0), (1, 9, 2.0), (2, 0, 3.0)], columns=["seed", "step", "loss"])
    _, [ax] = report.new_figure()
    report.lines(ax, df.assign(arm="diff"), "step", "loss", each="seed")
    first, second, mean = ax.get_lines()
    assert first.get_xydata().tolist() == [[0, 1], [9, 2]]
    assert second.get_xydata().tolist() == [[0, 3]]
    assert mean.get_xydata().tolist() == [[0, 2]]  # only where both have a value


# loss


def fake_run(name, arm, seed, loss, reached=100, **settings):
    """The log of a run of 100 steps. inf: it diverged. reached: it was stopped there."""
    head = dict.fromkeys(bench.CONDITIONS) | dict.fromkeys(bench.SHARED)
    head |= dict.fromkeys(field.name for field in bench.fields(bench.GPTConfig))
    head |= dict(arm=arm, attn=arm.split("-")[0], seed=seed, steps=100, tokens=1000, lr=1e-3)
    head |= dict(tokenizer="bytes", dtype="float32") | settings
    half = dict(step=50, tokens=500, val_loss=4.0, tok_per_s=100.0)
    last = dict(step=reached, tokens=10 * reached, val_loss=loss, tok_per_s=100.0)
    if loss == INF:
        last = dict(step=reached, tokens=10 * reached, diverged="val_loss nan")
    folder = Path("runs", name)
    folder.mkdir(parents=True)
    lines = [json.dumps(row) + "\n" for row in (head, half, last)]
    (folder / "log.jsonl").write_text("".join(lines))


def measured_losses():
    """What bench.py loss makes of the fake runs: {arm: row}, and the text of the page."""
    bench.main(["loss", "runs", "--out=results"])
    runs, _ = bench.read_runs(["runs"])
    return by_arm(bench.loss_table(*bench.at_best_rates(runs))), Path("results/loss.md").read_text()


def test_losses_by_hand():
    for seed, a, b in [(1, 1.0, 5.0), (2, 3.0, 7.0)]:
        fake_run(f"a{seed}", "softmax", seed, a)
        fake_run(f"b{seed}", "diff", seed, b)
    fake_run("copy", "diff", 1, 5.0)
    fake_run("cut", "linear", 1, 2.5, reached=60)
    rows, text = measured_losses()
    assert list(rows) == ["softmax", "diff"]
    assert rows["softmax"]["val loss"] == "2.000 ± 12.706"
    assert rows["diff"]["n"] == 2
    assert rows["diff"]["− softmax"] == "4.000 ± 6.085"  # as in test_differences_by_hand
    assert "edge" not in rows["diff"]  # one rate alone has no neighbours
    assert "| runs/copy | another folder has the same run |" in text
    assert "| runs/cut | stopped at step 60 of 100 |" in text
    assert len(json.loads(Path("results/loss.json").read_text())["runs"]) == 4


def test_a_run_that_diverged_is_the_worst():
    for seed in (1, 2):
        fake_run(f"a{seed}", "softmax", seed, 3.0 + seed)
        fake_run(f"low{seed}", "diff", seed, 3.0 + seed)
        fake_run(f"best{seed}", "diff", seed, 2.0 + seed, lr=2e-3)
        fake_run(f"high{seed}", "diff", seed, [1.0, INF][seed - 1], lr=4e-3)
        fake_run(f"inf{seed}", "linear", seed, [1.0, INF][seed - 1])
    rows, text = measured_losses()
    assert (rows["diff"]["lr"], rows["diff"]["tried"], rows["diff"]["edge"]) == (0.002, 3, "")
    assert rows["linear"]["val loss"] == "inf"
    assert rows["linear"]["− softmax"] == "inf"

    for path in Path("runs").glob("low*/log.jsonl"):
        path.unlink()
    assert measured_losses()[0]["diff"]["edge"] == "at the edge"


def test_an_arm_is_compared_to_softmax_with_the_same_settings():
    fake_run("a", "softmax-n_layer1", 1, 2.0)
    fake_run("b", "softmax-n_layer1-decay", 1, 1.0, decay=True)
    fake_run("c", "softmax-n_layer1-subln", 1, 1.5, subln=True)
    fake_run("d", "diff-n_layer1-nosubln-decay", 1, 3.0, decay=True, subln=False)
    fake_run("e", "diff-n_layer1-n_head8", 1, 3.0, n_head=8)
    rows, _ = measured_losses()
    # all of them have n_layer1, so it is no part of their names
    names = ["softmax", "softmax-decay", "softmax-subln", "diff-n_head8", "diff-nosubln-decay"]
    assert list(rows) == names
    assert rows["diff-nosubln-decay"]["− softmax"] == "2.000"
    assert rows["softmax-subln"]["− softmax"] == "-0.500"
    assert pd.isna(rows["diff-n_head8"]["− softmax"])  # no softmax has these heads


@pytest.mark.parametrize("name", bench.SHARED)
def test_runs_that_differ_in_more_than_the_arm_are_refused(name):
    fake_run("a", "softmax", 1, 2.0)
    fake_run("b", "diff", 1, 2.0, **{name: 77})
    with pytest.raises(ValueError, match=f"runs/a and runs/b can't be compared: {name} is .* 77"):
        bench.main(["loss", "runs"])


def test_where_there_are_no_runs():
    with pytest.raises(ValueError, match="no runs below runs: `python train.py"):
        bench.main(["loss", "runs"])
    fake_run("cut", "linear", 1, 2.5, reached=60)
    with pytest.raises(ValueError, match="no run is finished: runs/cut stopped at step 60 of 100"):
        bench.main(["loss", "runs"])


# speed and decode


def test_functions_are_timed_in_turn():
    called = []

    def build(name):
        return lambda: called.append(name), dict(tokens=5)

    def fail():
        raise RuntimeError("no such card\nand more")

    def build_what_fails():
        return fail, {}

    builders = dict(a=lambda: build("a"), x=fail, y=build_what_fails, b=lambda: build("b"))
    rows = bench.time_rounds(builders, repeats=3, enough=0)
    turns = [name for i, name in enumerate(called) if i == 0 or called[i - 1] != name]
    assert turns == ["a", "b"] * 4  # once to warm up, and three rounds
    assert rows[0] == dict(arm="x", error="no such card")
    assert rows[1] == dict(arm="y", error="no such card")
    assert [(row["arm"], row["round"]) for row in rows[2:4]] == [("a", 1), ("b", 1)]
    assert len(rows) == 2 + 2 * 3 and rows[2]["tokens"] == 5


def test_ratios_are_taken_within_a_round():
    """The second round is slow for both arms: the ratio does not see it."""
    rows = []
    for number, speed in enumerate([40.0, 4.0, 80.0], 1):
        rows.append({"arm": "softmax", "round": number, "tokens/s": speed})
        rows.append({"arm": "diff", "round": number, "tokens/s": speed / [2, 2, 8][number - 1]})
    timings = pd.DataFrame(rows).assign(T=8, sequences=1)
    row = by_arm(bench.timing_table(timings, "softmax"))["diff"]
    assert row["tokens/s"] == 10  # the median of 20, 2 and 10
    assert row["spread"] == "6 to 15"
    assert row["× softmax"] == 0.5


@pytest.fixture
def tiny_toy(monkeypatch):
    size = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=2)
    monkeypatch.setitem(bench.train.PRESETS, "toy", size)
    monkeypatch.setattr(bench, "pick_device", lambda: torch.device("cpu"))


FLAGS = ["--preset=toy", "--T=16,32", "--repeats=2", "--out=results"]


@pytest.mark.parametrize("verb, parts", [("speed", 2), ("decode", 1)])
def test_every_arm_is_timed(verb, parts, tiny_toy):
    bench.main([verb, *FLAGS, "--decay"])
    result = json.loads(Path(f"results/{verb}.json").read_text())
    timings = pd.DataFrame(result["runs"])
    assert "error" not in timings
    assert len(timings) == parts * 2 * len(ATTENTION) * 2  # lengths, arms, rounds
    assert (timings["tokens/s"] > 0).all()
    assert result["conditions"]["decay"] is True
    # the published table is that of the published timings
    for _, part in timings.groupby("part"):
        table = report.to_markdown(bench.timing_table(part, "softmax"))
        assert table in Path(f"results/{verb}.md").read_text()


def test_an_arm_that_fails_leaves_the_others(tiny_toy):
    bench.main(["decode", *FLAGS, "--minus_average", "--arms=softmax,diff,linear"])
    runs = json.loads(Path("results/decode.json").read_text())["runs"]
    failed = {row["arm"] for row in runs if "error" in row}
    timed = {row["arm"] for row in runs if "seconds" in row}
    assert (failed, timed) == ({"diff"}, {"softmax", "linear"})
    with pytest.raises(ValueError, match="nothing could be timed: .*diff"):
        bench.main(["decode", *FLAGS, "--minus_average", "--arms=diff"])


def test_the_bytes_of_the_state(tiny_toy):
    bench.main(["decode", *FLAGS])
    runs = pd.DataFrame(json.loads(Path("results/decode.json").read_text())["runs"])
    size = runs[runs["T"] == 16].groupby("arm")["bytes of state"].first()
    assert size["softmax"] == size["diff"] == 4 * 2 * 16 * 32  # keys and values, 32 channels
    assert size["linear"] == 4 * (32 * 16 + 32)  # 16 x 16 for each of two heads, and key sums
    assert size["diff_linear"] == 4 * (2 * 32 * 16 + 32)  # twice as many features
