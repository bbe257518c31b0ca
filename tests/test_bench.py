"""report.py and bench.py: the statistics by hand, the tables and figures, and the three verbs."""
import json
import math
from argparse import Namespace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.text import Text
from scipy import stats

import bench
import report
import train
from report import MeanError

torch.set_num_threads(1)  # on tensors this small, threads only wait for one another

# quantiles of Student's t for 95 %, from a printed table
T_2 = 4.3027
T_3 = 3.1824


@pytest.fixture
def tiny_toy(monkeypatch):
    """The toy preset so small that speed and decode take a moment."""
    size = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=2)
    monkeypatch.setitem(train.PRESETS, "toy", size)


def two_arms():
    """a has the mean 2 and b the mean 6. The squared distances are 1 + 1 and 1 + 1 + 4."""
    return pd.DataFrame(dict(row=list("aabbb"), loss=[1.0, 3.0, 5.0, 5.0, 8.0]))


# statistics


def test_the_standard_deviation_is_pooled_over_groups():
    sd, dof = report.pooled_sd(two_arms())
    assert dof == 3
    assert sd == pytest.approx(math.sqrt((2 + 6) / 3))


def test_a_run_without_a_value_does_not_count():
    unfinished = pd.DataFrame(dict(row=["a", "c"], loss=[math.nan, math.nan]))
    noise = report.Noise(pd.concat([two_arms(), unfinished]))
    finished = report.Noise(two_arms())
    assert noise.pools == finished.pools
    assert noise.mean("a") == finished.mean("a")
    assert noise.mean("c") is None
    assert noise.difference("a", "c") is None


def test_without_two_seeds_there_is_no_interval():
    noise = report.Noise(pd.DataFrame(dict(row=["a", "b"], loss=[1.0, 2.0])))
    assert noise.mean("a").mean == 1.0
    assert math.isnan(noise.mean("a").error)
    assert report.format_cell(noise.difference("b", "a")) == "1.000"
    assert noise.sentences() == {"noise of all rows": "unknown, because no row has two runs"}


def test_intervals_by_hand():
    # of a mean: t sd / sqrt(n)
    assert report.half_width(2.0, 3, 4) == pytest.approx(T_3, abs=1e-4)
    # of a difference: t sd sqrt(1/n + 1/m)
    assert report.half_width(1.0, 2, 2, 2) == pytest.approx(T_2, abs=1e-4)
    assert report.half_width(1.0, 3, 1, 3) == pytest.approx(T_3 * math.sqrt(4 / 3), abs=1e-4)
    # the same table says 9.9248 for 99 % and 2 degrees of freedom
    assert report.half_width(1.0, 2, 1, level=0.99) == pytest.approx(9.9248, abs=1e-4)


def test_means_and_differences_have_the_pooled_error():
    noise = report.Noise(two_arms())
    half = T_3 * math.sqrt(8 / 3)
    assert noise.mean("a") == pytest.approx((2.0, half / math.sqrt(2)), abs=1e-3)
    assert noise.mean("b") == pytest.approx((6.0, half / math.sqrt(3)), abs=1e-3)
    expected = 4.0, half * math.sqrt(1 / 2 + 1 / 3)
    assert noise.difference("b", "a") == pytest.approx(expected, abs=1e-3)
    least = half * math.sqrt(2 / 3)
    (said,) = noise.sentences().values()
    assert f"two means of 3 runs must differ by {least:.3f} to be told apart" in said


def test_a_difference_of_two_pools_is_welchs():
    rng = np.random.default_rng(0)
    quiet = rng.normal(3.0, 0.1, 6)
    loud = rng.normal(3.2, 1.0, 4)
    runs = pd.DataFrame(dict(row=["quiet"] * 6 + ["loud"] * 4, loss=[*quiet, *loud]))
    noise = report.Noise(runs.assign(pool=runs["row"]))
    # with one row in each pool this is Welch's test as everybody knows it
    interval = stats.ttest_ind(loud, quiet, equal_var=False).confidence_interval(0.95)
    mean, half = noise.difference("loud", "quiet")
    assert (mean - half, mean + half) == pytest.approx((interval.low, interval.high))
    # a mean has the error of its own pool
    error = report.half_width(quiet.std(ddof=1), 5, 6)
    assert noise.mean("quiet").error == pytest.approx(error)


def test_a_pool_of_which_nothing_is_known_gives_no_interval():
    runs = two_arms().assign(pool="known")
    runs.loc[len(runs)] = ["c", 7.0, "a single run"]
    noise = report.Noise(runs)
    # in either order, and the other rows are as they were
    assert noise.difference("c", "a").mean == 5.0
    assert math.isnan(noise.difference("c", "a").error)
    assert math.isnan(noise.difference("a", "c").error)
    assert noise.difference("b", "a") == report.Noise(two_arms()).difference("b", "a")


def test_runs_that_do_not_differ_have_an_interval_of_no_width():
    runs = pd.DataFrame(dict(row=list("aabb"), loss=[1.0, 1.0, 2.0, 2.0], pool=list("xxyy")))
    assert report.Noise(runs).difference("b", "a") == (1.0, 0.0)


# tables and files


@pytest.mark.parametrize(
    "cell, text",
    [
        (MeanError(0.03144, 0.0099), "0.031 ± 0.010"),
        (MeanError(0.03144, 0.00012), "0.0314 ± 0.0001"),
        (MeanError(-12345.6, 7.8), "-12,346 ± 8"),
        (MeanError(2.5, math.nan), "2.500"),
        (MeanError(math.nan, math.nan), "–"),
        (None, "–"),
        (math.nan, "–"),
        (True, "yes"),
        (1234567, "1,234,567"),
        (0.123456, "0.1235"),
        (45678.9, "45,679"),
        ("a|b", "a\\|b"),
    ],
)
def test_cells_of_a_table(cell, text):
    assert report.format_cell(cell) == text


def published(figure):
    table = pd.DataFrame([dict(arm="a", loss=MeanError(2.0, 1.5)), dict(arm="b", loss=None)])
    runs = pd.DataFrame(dict(arm=["a", "b"], seed=[1, 1], loss=[2.0, math.nan]))
    report.publish(Path("new/out"), "x", dict(steps=5), {"The losses": table}, figure, runs)


def test_a_result_is_published_in_three_forms(capsys):
    figure, _ = report.new_figure()
    published(figure)
    text = Path("new/out/x.md").read_text()
    assert text.startswith("steps: 5; command: python ")
    assert "The losses\n\n| arm | loss |\n| --- | --- |\n| a | 2.000 ± 1.500 |\n| b | – |" in text
    assert text in capsys.readouterr().out

    result = json.loads(Path("new/out/x.json").read_text())
    assert result["about"]["steps"] == 5
    a, b = result["tables"]["The losses"]
    assert a == {"arm": "a", "loss": {"mean": 2.0, "error": 1.5}}
    assert b == {"arm": "b", "loss": None}
    # one row for each run, and null for what is not a number
    assert result["runs"][0] == {"arm": "a", "seed": 1, "loss": 2.0}
    assert result["runs"][1]["loss"] is None
    assert Path("new/out/x.png").read_bytes().startswith(b"\x89PNG")


def test_the_tables_are_printed_before_anything_is_written(capsys):
    class Unwritable:
        def savefig(self, path):
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        published(Unwritable())
    assert "| a | 2.000 ± 1.500 |" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_to_is_found_out_first(monkeypatch):
    Path("file").touch()
    with pytest.raises(OSError):
        report.check_can_publish(Path("file/out"))
    monkeypatch.setattr(bench, "time_interleaved", lambda *args: pytest.fail("it began to time"))
    with pytest.raises(OSError):
        bench.main(["speed", "--device=cpu", "--out=file/out"])


# figures


def test_arms_of_one_colour_have_different_markers():
    look = report.styles(["diff", "diff, no norm", "diff_linear", "delta rule", "shift"])
    assert look["diff"]["color"] == look["diff, no norm"]["color"] == report.STYLE["diff"]["color"]
    assert look["diff"]["marker"] != look["diff, no norm"]["marker"]
    colors = {look[arm]["color"] for arm in ("diff", "diff_linear", "delta rule", "shift")}
    assert len(colors) == 4


def test_a_line_for_each_seed_and_a_thick_one_for_their_mean():
    df = pd.DataFrame([(1, 0, 1.0), (1, 9, 2.0), (2, 0, 3.0)], columns=["seed", "step", "loss"])
    _, [ax] = report.new_figure()
    report.line_plot(ax, df.assign(arm="diff"), "step", "loss", by="arm", seed="seed")
    first, second, mean = ax.get_lines()
    assert first.get_xydata().tolist() == [[0, 1], [9, 2]]
    assert second.get_xydata().tolist() == [[0, 3]]
    assert mean.get_xydata().tolist() == [[0, 2]]  # only where both seeds have a value
    assert mean.get_linewidth() > first.get_linewidth()


def test_labels_at_the_ends_do_not_lie_on_each_other():
    figure, (ax,) = report.new_figure()
    for number in range(8):
        ax.plot([0, 1], [0, 1 + number / 1000], label=f"arm {number}")
    ax.plot([0, 1], [0, 0.0], label="low")
    ax.plot([0, 1], [0, 0.001], label="nearly as low")
    ax.plot([0, 1], [0, 0.5])  # a line without a label
    report.label_ends(ax)
    figure.draw_without_rendering()
    # the boxes of the letters alone: that of an annotation includes its thread
    boxes = {text.get_text(): Text.get_window_extent(text) for text in ax.texts}
    order = sorted(boxes, key=lambda label: boxes[label].y0)
    assert order == ["low", "nearly as low", *(f"arm {number}" for number in range(8))]
    for lower, upper in zip(order, order[1:]):
        assert boxes[lower].y1 <= boxes[upper].y0 + 1  # pixels
    assert boxes["arm 7"].y1 < figure.bbox.y1
    assert boxes["low"].y0 > ax.bbox.y0


def test_a_dot_for_each_run_and_the_interval_of_the_mean():
    figure, (ax,) = report.new_figure()
    report.dot_plot(ax, two_arms(), "loss", row="row")
    dots = [dots.get_offsets().tolist() for dots in ax.collections if len(dots.get_offsets()) > 1]
    assert dots == [[[1, 0], [3, 0]], [[5, 1], [5, 1], [8, 1]]]
    (bar,) = ax.containers[0].lines[2]
    half = T_3 * math.sqrt(8 / 3) / math.sqrt(2)
    assert bar.get_segments()[0][:, 0].tolist() == pytest.approx([2 - half, 2 + half], abs=1e-3)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    bottom, top = ax.get_ylim()
    assert bottom > top  # the first row is on top


def test_the_first_of_two_conditions_is_hollow():
    figure, (ax,) = report.new_figure()
    df = two_arms().assign(row="diff", decay=["without", "without", "with", "with", "with"])
    report.dot_plot(ax, df, "loss", row="row", condition="decay")
    dots = [dots for dots in ax.collections if len(dots.get_offsets()) > 1]
    hollow = dots[0]
    filled = dots[1]
    assert hollow.get_facecolor()[0, :3].tolist() == [1, 1, 1]
    assert filled.get_facecolor()[0, :3].tolist() == filled.get_edgecolor()[0, :3].tolist()
    assert hollow.get_offsets()[0, 1] < filled.get_offsets()[0, 1]
    assert [text.get_text() for text in ax.texts] == ["hollow: without", "filled: with"]


def test_figure_and_table_agree_where_there_are_pools():
    runs = pd.DataFrame(dict(arm=list("aaaabb"), decay=list("nnyyyy"), loss=[1, 3, 5, 5.2, 7, 7.1]))
    runs = runs.assign(pool=runs["decay"], row=runs["arm"] + runs["decay"])
    noise = report.Noise(runs)
    _, (ax,) = report.new_figure()
    report.dot_plot(ax, runs, "loss", row="arm", condition="decay", pool="pool")
    # the intervals are drawn in the order of the runs
    for bars, row in zip(ax.containers, ("an", "ay", "by"), strict=True):
        mean, half = noise.mean(row)
        ends = bars.lines[2][0].get_segments()[0][:, 0]
        assert ends.tolist() == pytest.approx([mean - half, mean + half])


# loss


def fake_run(name, attn, seed, loss, reached=100, **settings):
    """The log of a run of 100 steps that was stopped at the step `reached`.

    Without a loss it diverged there.
    """
    head = dict(attn=attn, seed=seed, steps=100, n_head=4, lr=1e-3) | settings
    half = dict(step=reached // 2, tokens=500 * reached, val_loss=(loss or 4.0) + 1)
    last = dict(step=reached, tokens=1000 * reached, val_loss=loss, tok_per_s=100.0)
    if loss is None:
        last = dict(step=reached, tokens=1000 * reached, not_finite="train_loss nan")
    Path(name).mkdir()
    lines = [json.dumps(row) + "\n" for row in (head, half, last)]
    Path(name, "log.jsonl").write_text("".join(lines))


def measured(*flags):
    """The tables that a verb wrote, each a list of rows."""
    bench.main([*flags, "--out=results"])
    return list(json.loads(Path(f"results/{flags[0]}.json").read_text())["tables"].values())


def by_arm(rows):
    return {row["arm"]: row for row in rows}


def test_loss_by_hand():
    fake_run("a1", "softmax", 1, 2.0)
    fake_run("a2", "softmax", 2, 3.0)
    fake_run("b1", "diff", 1, 2.5)
    fake_run("b2", "diff", 2, 3.3)
    fake_run("c1", "linear", 1, 2.5)
    fake_run("c2", "linear", 2, 2.5, reached=60)
    (table, others) = measured("loss", ".")
    assert others == [dict(run="c2", status="stopped at step 60 of 100")]
    rows = by_arm(table)
    assert list(rows) == ["softmax", "diff", "linear"]
    assert [row["n"] for row in table] == [2, 2, 1]
    # squared distances from the means: 0.25 + 0.25 and 0.16 + 0.16, with 1 + 1 degrees of freedom
    half = T_2 * math.sqrt(0.82 / 2)  # of a 95 % interval of a mean of one run
    softmax = rows["softmax"]
    assert softmax["val loss"]["mean"] == 2.5
    assert softmax["val loss"]["error"] == pytest.approx(half / math.sqrt(2), rel=1e-3)
    assert softmax["− softmax"] is None
    assert softmax["tokens"] == 100_000
    assert softmax["tok/s"] == 100
    assert rows["diff"]["− softmax"]["mean"] == pytest.approx(0.4)
    assert rows["diff"]["− softmax"]["error"] == pytest.approx(half, rel=1e-3)
    # one run against two
    assert rows["linear"]["− softmax"]["mean"] == 0
    assert rows["linear"]["− softmax"]["error"] == pytest.approx(half * math.sqrt(1.5), rel=1e-3)

    result = json.loads(Path("results/loss.json").read_text())
    said = result["about"]["noise of all rows"]
    assert said.startswith("the sd of a run is 0.6403 (2 degrees of freedom)")
    runs = {run["run"]: run for run in result["runs"]}
    assert list(runs) == ["a1", "a2", "b1", "b2", "c1", "c2"]
    assert runs["b2"]["val loss"] == 3.3
    assert runs["c2"]["val loss"] is None


def test_what_became_of_a_run():
    cut = dict(step=3, train_loss=2.0, tok_per_s=5.0)
    nan = dict(step=4, not_finite="train_loss nan")
    said = [bench.describe_run(dict(steps=9), records) for records in ([], [cut], [cut, nan])]
    assert [run["status"] for run in said] == [
        "stopped at step 0 of 9", "stopped at step 3 of 9", "diverged: train_loss nan"]
    assert [run["tok_per_s"] for run in said[1:]] == [5.0, 5.0]


def test_an_arm_with_a_run_that_diverged_has_no_mean():
    fake_run("a1", "softmax", 1, 2.0)
    fake_run("a2", "softmax", 2, 3.0)
    fake_run("b1", "diff", 1, 1.0)
    fake_run("b2", "diff", 2, None, reached=60)
    table, others = measured("loss", ".")
    assert others == [dict(run="b2", status="diverged: train_loss nan")]
    softmax, diff = table
    assert (softmax["n"], softmax["diverged"], softmax["val loss"]["mean"]) == (2, 0, 2.5)
    # the 1.0 of the run that is left is not the mean of the arm
    assert (diff["n"], diff["diverged"], diff["val loss"], diff["− softmax"]) == (1, 1, None, None)


def test_a_rate_at_which_a_run_diverged_is_not_the_best(monkeypatch):
    titles = []
    monkeypatch.setattr(report, "add_title", lambda figure, title: titles.append(title))
    for seed in (1, 2):
        fake_run(f"a{seed}", "diff", seed, 3.0)
        fake_run(f"b{seed}", "diff", seed, 2.0, lr=2e-3)
    fake_run("b3", "diff", 3, None, lr=2e-3)
    table, (best,), others = measured("loss", ".")
    assert best["rate"] == "0.001 (at the edge)"
    assert best["val loss"]["mean"] == 3.0
    # the losses that are shown are those that chose the rate
    assert titles[0].endswith("chosen on these same runs")


def test_a_run_that_resumed_on_another_card_names_both():
    head = dict(steps=9, device_name="A100", torch="2.9", dtype="bfloat16")
    records = [dict(step=3), dict(step=3, resumed=dict(device_name="H100", device="cuda:1"))]
    run = bench.describe_run(head, records)
    assert run["device_name"] == "A100, then H100"
    assert (run["torch"], run["dtype"]) == ("2.9", "bfloat16")
    assert bench.conditions_of_runs(pd.DataFrame([run]))["device_name"] == "A100, then H100"


def test_an_arm_is_compared_to_softmax_with_the_same_settings():
    fake_run("a", "softmax", 1, 2.0)
    fake_run("half", "softmax", 1, 9.0, n_head=2)
    fake_run("decay", "softmax", 1, 1.0, decay=True)
    fake_run("norm", "softmax", 1, 1.5, subln=True)
    fake_run("b", "diff", 1, 2.5, lambda_init=0.5)
    fake_run("long", "diff", 1, 0.0, block_size=512)
    runs, *_ = bench.read_runs([Path()])
    names = dict(zip(runs["run"], runs["arm"]))
    arms = bench.softmax_beside(runs)
    # the norm and lambda, which softmax lacks, may differ. No softmax has the long block
    assert arms == {names["norm"]: names["a"], names["b"]: names["a"]}
    assert names["half"].startswith("softmax") and "n_head2" in names["half"]


def test_each_arm_at_its_own_best_rate():
    for seed, softmax, diff in ((1, 2.0, 2.5), (2, 3.0, 3.3)):
        fake_run(f"a{seed}", "softmax", seed, softmax)
        fake_run(f"b{seed}", "diff", seed, diff, lr=2e-3)
        fake_run(f"worse{seed}", "diff", seed, 5.0, lr=1e-3)
        fake_run(f"bad{seed}", "diff", seed, 6.0, lr=3e-3)
    fake_run("lucky", "diff", 2, 0.1, lr=0.00400000001)  # the best of all, but one seed of two
    table, best = measured("loss", ".")
    softmax, *diff = by_arm(table)
    assert softmax == "softmax lr1e-3"
    assert diff == ["diff lr1e-3", "diff lr2e-3", "diff lr3e-3", "diff lr4.00000001e-3"]
    assert by_arm(table)["diff lr1e-3"]["− softmax"]["mean"] == 2.5
    assert by_arm(table)["diff lr2e-3"]["− softmax"] is None  # there is no softmax at this rate
    assert list(by_arm(best)) == ["softmax", "diff"]
    assert by_arm(best)["diff"]["rate"] == "0.002"
    assert by_arm(best)["softmax"]["rate"] == "0.001 (at the edge)"
    assert by_arm(best)["diff"]["− softmax"]["mean"] == pytest.approx(0.4)


def test_a_run_is_counted_once_and_a_broken_log_is_named():
    fake_run("a", "softmax", 1, 2.0)
    fake_run("copy", "softmax", 1, 2.0)
    fake_run("cut", "softmax", 1, 7.0, reached=50)
    Path("broken").mkdir()
    Path("broken/log.jsonl").write_text("no log\n")
    table, others = measured("loss", ".")
    assert table[0]["n"] == 1
    assert table[0]["val loss"]["mean"] == 2.0
    reasons = {row["run"]: row["status"] for row in others}
    assert reasons.keys() == {"copy", "cut", "broken"}
    assert reasons["copy"] == reasons["cut"] == "another folder has the same run"
    assert "broken/log.jsonl is not a whole log" in reasons["broken"]


def test_runs_that_are_not_finished_have_their_curves():
    fake_run("a", "softmax", 1, 2.0, reached=60)
    fake_run("b", "diff", 1, 2.0, reached=60)
    table, others = measured("loss", ".")
    assert [(row["n"], row["val loss"]) for row in table] == [(0, None), (0, None)]
    assert len(others) == 2


def test_the_axes_of_the_curves_show_what_differs():
    """The runs fall by 1 and end 0.01 apart: on an axis with the whole fall that is a hair."""
    fake_run("a", "softmax", 1, 2.0)
    fake_run("b", "diff", 1, 2.01)
    runs, evals, _ = bench.read_runs([Path()])
    curves = evals.merge(runs[["run", "arm"]])
    figure = bench.loss_figure(runs, curves, "A title", "nats per token")
    low, high = figure.axes[0].get_ylim()
    assert low < 2.0
    assert 2.01 < high
    assert 0.01 > (high - low) / 4


@pytest.mark.parametrize(
    "difference, title",
    [
        (MeanError(-0.05, 0.01), "diff is 0.050 ± 0.010 below softmax"),
        (MeanError(0.05, 0.01), "diff is 0.050 ± 0.010 above softmax"),
        (MeanError(-0.05, 0.06), "diff and softmax can't be told apart (-0.050 ± 0.060)"),
        (MeanError(-0.05, math.nan), "diff is 0.050 below softmax, in one run each"),
    ],
)
def test_the_title_says_no_more_than_the_interval(difference, title):
    softmax = {"arm": "softmax", "val loss": MeanError(1.0, 0.01), "− softmax": None}
    diff = {"arm": "diff", "val loss": MeanError(1.05, 0.01), "− softmax": difference}
    unfinished = {"arm": "linear", "val loss": None, "− softmax": None}
    assert bench.loss_finding(pd.DataFrame([softmax, diff, unfinished])) == title


def test_the_lowest_of_several_arms_is_only_ranked():
    table = []
    for arm, mean in dict(softmax=2.0, diff=1.5, linear=3.0).items():
        difference = None if arm == "softmax" else MeanError(mean - 2.0, 0.01)
        table.append({"arm": arm, "val loss": MeanError(mean, 0.01), "− softmax": difference})
    title = bench.loss_finding(pd.DataFrame(table))
    assert title.endswith("a ranking and not a test: diff 1.500, softmax 2.000, linear 3.000")
    assert bench.loss_finding(pd.DataFrame(table[:1])) == "Mean loss: softmax 2.000"
    table[0]["val loss"] = None
    assert bench.loss_finding(pd.DataFrame(table[:1])) == "No run is finished"


def test_losses_of_bytes_are_per_byte():
    fake_run("a", "softmax", 1, 2.0, tokenizer="bytes")
    measured("loss", "a")
    assert "nats per byte" in Path("results/loss.md").read_text()
    fake_run("b", "softmax", 1, 2.0, tokenizer="gpt2")
    measured("loss", "b")
    assert "nats per token" in Path("results/loss.md").read_text()


# speed and decode


def test_functions_are_timed_in_turn():
    called = []

    def build(name):
        return {"f": lambda: called.append(name)}, dict(kernel=name)

    def fail():
        raise RuntimeError("no such card\nand more")

    builders = {"a": lambda: build("a"), "broken": fail, "b": lambda: build("b")}
    facts, seconds = bench.time_interleaved(builders, repeats=3, enough=0)
    turns = [name for i, name in enumerate(called) if i == 0 or called[i - 1] != name]
    assert turns == ["a", "b"] * 4  # once to warm up, and three rounds
    assert facts["a"] == {"kernel": "a"}
    assert facts["broken"] == {"failed": "no such card"}
    assert {case: len(values) for case, values in seconds.items()} == {("a", "f"): 3, ("b", "f"): 3}


def test_ratios_are_taken_within_a_round(monkeypatch):
    """The second round is ten times as slow for both arms: the ratio does not see it."""
    seconds = {("softmax", "f"): [1.0, 10.0, 1.0], ("diff", "f"): [2.0, 20.0, 2.0]}
    seconds = {case: np.array(values) for case, values in seconds.items()}
    facts = {"softmax": {}, "diff": {}}
    monkeypatch.setattr(bench, "time_interleaved", lambda *args: (facts, seconds))
    args = Namespace(arms=["softmax", "diff"], kernel=["auto"], repeats=3)
    rows, timings = bench.time_arms(args, bench.Case("part", print, B=4, T=8, tokens=32))
    assert rows[0]["sequences"] == 4
    assert rows[0]["f, tokens/s"] == 32
    assert rows[1]["f, tokens/s"] == 16
    assert rows[1]["f, × softmax"] == (0.5, 0.0)
    assert len(timings) == 6
    slow = dict(part="part", T=8, arm="diff", what="f", round=2, seconds=20.0)
    assert slow | {"tokens/s": 1.6} in timings


def test_the_title_compares_within_a_round_as_the_table_does():
    """The ratios of the rounds are 3, 1.2 and 0.5. That of the medians, 3 and 2, would be 1.5."""
    speeds = dict(softmax=[1.0, 10.0, 2.0], diff=[3.0, 12.0, 1.0])
    rounds = []
    for arm, values in speeds.items():
        for number, value in enumerate(values, 1):
            rounds.append({"arm": arm, "T": 64, "round": number, "tokens/s": value})
            rounds.append({"arm": arm, "T": 32, "round": number, "tokens/s": 1 / value})
    rounds = pd.DataFrame(rounds)
    assert bench.fastest(rounds, "softmax", 64) == "diff (1.2 × softmax)"
    assert bench.fastest(rounds, "softmax", 32) == "softmax"
    assert bench.fastest(rounds, "diff", 64) == "diff"
    assert bench.fastest(rounds, "an arm that failed", 64) == "diff"


def test_speed_times_attention_and_the_training_step(tiny_toy):
    flags = ["--device=cpu", "--repeats=2", "--T=16", "--kernel=auto,cudnn"]
    tables = measured("speed", *flags)
    assert len(tables) == 2
    for rows, what in zip(tables, ("forward + backward", "step")):
        names = "softmax, softmax cudnn, diff, diff cudnn, linear, diff_linear"
        assert ", ".join(by_arm(rows)) == names
        for arm, row in by_arm(rows).items():
            if arm.endswith("cudnn"):
                assert "can't run on cpu" in row["failed"]
                assert row[f"{what}, tokens/s"] is None
            else:
                assert row["failed"] is None
                assert row["kernel"] == ("chunks" if "linear" in arm else "sdpa")
                assert row[f"{what}, tokens/s"] > 0
                assert row["forward, × softmax"]["mean"] > 0
    # one row for each timing: 4 arms that run, 2 things of 2 parts, 2 rounds
    assert len(json.loads(Path("results/speed.json").read_text())["runs"]) == 4 * 2 * 2 * 2


def test_decode_counts_the_bytes_of_the_state(tiny_toy):
    one, three = measured("decode", "--device=cpu", "--repeats=1", "--T=16", "--num_samples=1,3")
    cache = 2 * 16 * 32  # keys and values of 16 tokens, 32 channels
    linear = 32 * 16 + 32  # a matrix of 16 x 16 for each of two heads, and the sums of the keys
    diff_linear = 2 * 32 * 16 + 32  # twice as many features
    numbers = dict(softmax=cache, diff=cache, linear=linear, diff_linear=diff_linear)
    for rows in (one, three):
        for arm, row in by_arm(rows).items():
            assert row["bytes of state a sequence"] == 4 * numbers[arm]
            assert row["step, tokens/s"] > 0
    assert by_arm(one)["diff"]["step, × recompute"]["mean"] > 0
    assert "step, × recompute" not in three[0]


def test_each_panel_says_what_is_best_in_it(tiny_toy, monkeypatch):
    titled = []
    monkeypatch.setattr(report, "add_title", lambda *found: titled.append(found))
    flags = ["--device=cpu", "--repeats=1", "--T=16", "--arms=softmax", "--num_samples=1,2,3"]
    measured("decode", *flags)
    sequences = ["one sequence", "2 sequences at once", "3 sequences at once"]
    expected = [f"sampling {of}. Fastest:\nat 16 softmax" for of in sequences]
    state = "state: what is kept of the context of a sequence.\nSmallest: at 16 softmax"
    ((figure, title),) = titled
    assert title == "Fastest: at 16 tokens softmax"
    assert [ax.get_title(loc="left") for ax in figure.axes] == [*expected, state]


@pytest.mark.parametrize(
    "flag, compiled", [("--compile", ["step", "forward"]), ("--no-compile", [])]
)
def test_a_step_and_recomputing_are_both_compiled_or_neither(flag, compiled, tiny_toy, monkeypatch):
    found = []

    # the real one takes half a minute, and says nothing of what it was called with
    def compile(function, **options):
        found.append("forward" if isinstance(function, torch.nn.Module) else function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    flags = ["--device=cpu", "--repeats=1", "--T=16", "--arms=diff", "--num_samples=1"]
    measured("decode", *flags, flag)
    assert found == compiled


@pytest.mark.parametrize("verb", ["speed", "decode"])
def test_decay_reaches_the_models_that_are_timed(verb, tiny_toy, monkeypatch):
    configs = []
    GPT = bench.GPT
    monkeypatch.setattr(bench, "GPT", lambda config: configs.append(config) or GPT(config))
    flags = ["--device=cpu", "--repeats=1", "--T=16", "--arms=diff,linear"]
    measured(verb, *flags, "--decay")
    assert configs
    assert all(config.decay for config in configs)
    assert json.loads(Path(f"results/{verb}.json").read_text())["about"]["decay"] is True


def test_nothing_but_failures_is_an_error_and_leaves_what_was_there(tiny_toy):
    flags = ["--device=cpu", "--repeats=1", "--T=16", "--arms=softmax"]
    measured("speed", *flags)
    before = Path("results/speed.json").read_bytes()
    with pytest.raises(ValueError, match="nothing could be timed: .*can't run on cpu"):
        measured("speed", *flags, "--kernel=cudnn")
    assert Path("results/speed.json").read_bytes() == before


# flags


@pytest.mark.parametrize(
    "flags, says",
    [
        ("speed --T=256,", "argument --T: '' is not "),
        ("speed --T=abc", "argument --T: 'abc' is not "),
        ("decode --num_samples=1.5", "argument --num_samples: '1.5' is not "),
        ("speed --kernel=fast", "argument --kernel: 'fast' is not one of auto, "),
        ("decode --arms=softmax,cosine", "argument --arms: 'cosine' is "),
        ("slices", "invalid choice: 'slices'"),
    ],
)
def test_a_wrong_flag_is_named_in_one_line(flags, says, capsys):
    with pytest.raises(SystemExit):
        bench.main(flags.split())
    usage, error = capsys.readouterr().err.strip().split("\n")
    assert usage.startswith("usage: bench.py")
    assert says in error


def test_what_cannot_be_compared_or_used_is_said():
    with pytest.raises(ValueError, match="no runs below out: `python train.py"):
        bench.main(["loss"])
    with pytest.raises(ValueError, match="the device tpu9"):
        bench.main(["speed", "--device=tpu9"])
