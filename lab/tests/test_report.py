"""report.py: the statistics by hand, and what is published."""
import json
import math
from pathlib import Path

import pytest

pd = pytest.importorskip("pandas", reason="needs lab/requirements.txt")

from lab import report  # noqa: E402

T_1 = 12.706  # quantiles of Student's t for 95 %, from a printed table
T_2 = 4.3027
INF = math.inf
RUNS = pd.DataFrame(dict(arm=list("aabbcdd"), loss=[1.0, 3.0, 5.0, 7.0, 4.0, INF, 2.0]))


def test_means_by_hand():
    rows = {row["arm"]: row for row in report.means(RUNS).to_dict("records")}
    assert [row["n"] for row in rows.values()] == [2, 2, 1, 2]
    # the sd of 1 and 3 is sqrt(2), and that of their mean sqrt(2) / sqrt(2)
    assert rows["a"]["mean"] == 2
    assert rows["a"]["high"] - 2 == pytest.approx(T_1 * 1, rel=1e-4)
    assert math.isnan(rows["c"]["low"])  # one run says nothing of the noise
    assert rows["d"]["mean"] == INF  # and the run that is left does not stand for the arm


def test_differences_by_hand():
    table = report.compare(RUNS, [("b", "a"), ("c", "a"), ("d", "a")])
    b, c, d = table.to_dict("records")
    # Welch: both means have a variance of 1. With equal ones the degrees of freedom are 1 + 1
    assert (b["arm"], b["base"], b["difference"]) == ("b", "a", 4)
    assert b["high"] - 4 == pytest.approx(T_2 * math.sqrt(1 + 1), rel=1e-4)
    assert c["difference"] == 2 and math.isnan(c["low"])
    assert d["difference"] == INF


def test_an_interval_is_written_with_the_digits_that_it_needs():
    rows = [(0.03144, 0.0099), (0.03144, 0.00012), (2.5, math.nan), (INF, math.nan)]
    table = pd.DataFrame([dict(mean=m, low=m - half, high=m + half) for m, half in rows])
    cells = report.plus_minus(table, "mean")["mean"].tolist()
    assert cells == ["0.031 ± 0.010", "0.0314 ± 0.0001", "2.500", "inf"]


def test_the_data_of_a_page_give_its_tables_again():
    tables = {"Losses": report.plus_minus(report.means(RUNS), "mean")}
    rows = RUNS.to_dict("records")
    figure, (ax,) = report.new_figure()
    report.dots(ax, RUNS)
    about = dict(machine="a card")
    report.publish("new/out", "x", "A title", tables, rows, about, figure, "python x.py")

    text = Path("new/out/x.md").read_text()
    data = Path("new/out/x.json").read_text()
    result = json.loads(data)
    again = report.average(pd.DataFrame(result["runs"]), ["arm"], ["loss"])
    assert report.to_markdown(again.rename(columns={"loss": "mean"})) in text
    assert "| d | 2 | inf |" in text
    assert len(data.splitlines()) == len(rows) + 2  # a run is a line
    assert result["machine"] == "a card" and result["command"] == "python x.py"
    assert Path("new/out/x.png").read_bytes().startswith(b"\x89PNG")
