"""
A result as a table, a figure and data: compares arms over their seeds, and publishes the three.

    runs = pd.DataFrame(dict(arm=list("aabb"), loss=[1.0, 1.2, 2.0, 2.2]))  # a line for each run
    table = means(runs)
    figure, (ax,) = new_figure(height=1 + 0.5 * len(table))
    dots(ax, runs, table)
    tables = {"Val loss": plus_minus(table, "mean"),
              "Differences": plus_minus(compare(runs, [("b", "a")]), "difference")}
    publish("out", "toy", "Two arms", tables, runs.to_dict("records"), dict(steps=500), figure)

A ± is always half of a 95 % interval. How far single runs or timings lie apart is called a spread.
A run that diverged has the loss inf, and so its arm has the mean inf: the runs that are left may be
the better ones.
"""
import json
import math
import platform
import shlex
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from common import UserError, commit

# Okabe and Ito's colours, which every kind of eye can tell apart
COLORS = {
    "softmax": "#0072B2",
    "diff": "#D55E00",
    "diff_v2": "#E69F00",
    "linear": "#009E73",
    "diff_linear": "#CC79A7",
}
OTHER_COLORS = ["#000000", "#56B4E9", "#777777"]  # for what is none of these arms


def need(package):
    """UserError if a package of the lab is missing. A program asks before its work, not after."""
    if find_spec(package) is None:
        raise UserError(f"{package} is missing: pip install -r lab/requirements.txt")


# -----------------------------------------------------------------------------
# statistics


def means(runs, value="loss"):
    """The mean of each arm's runs with its 95 % interval (Student's t), in the order of the runs.

    runs: a data frame with a row for each run, and the columns arm and `value`.
    Returns a data frame: arm, n, mean, low, high. low and high are NaN where there is one run only,
    or one that diverged.
    """
    import pandas as pd
    from scipy import stats

    rows = []
    for arm, group in runs.groupby("arm", sort=False):
        losses = group[value]
        n = len(losses)
        half = math.nan
        if n > 1 and np.isfinite(losses).all():
            half = stats.t.ppf(0.975, n - 1) * losses.sem()
        mean = losses.mean()
        rows.append(dict(arm=arm, n=n, mean=mean, low=mean - half, high=mean + half))
    return pd.DataFrame(rows, columns=["arm", "n", "mean", "low", "high"])


def compare(runs, pairs, level=0.95):
    """The difference of the mean losses of two arms with its interval (Welch), for each pair.

    Arms that share a seed are not paired: that took nothing off the noise.
    runs: a data frame with a row for each run, and the columns arm and loss.
    pairs: tuples of an arm and the one that it is compared to.
    Returns a data frame: arm, base, difference, low, high. The last two are NaN as in means.
    """
    import pandas as pd
    from scipy import stats

    rows = []
    for arm, base in pairs:
        a = runs.loc[runs["arm"] == arm, "loss"]
        b = runs.loc[runs["arm"] == base, "loss"]
        low = high = math.nan
        if min(len(a), len(b)) > 1 and np.isfinite([*a, *b]).all():
            low, high = stats.ttest_ind(a, b, equal_var=False).confidence_interval(level)
        difference = float(a.mean()) - float(b.mean())
        rows.append(dict(arm=arm, base=base, difference=difference, low=low, high=high))
    return pd.DataFrame(rows, columns=["arm", "base", "difference", "low", "high"])


# -----------------------------------------------------------------------------
# tables


def plus_minus(table, column):
    """The table of means or compare for a page: low and high become a ± behind the `column`.

        plus_minus(means(runs), "mean")     # arm, n, mean, where mean is text like "1.250 ± 0.010"
    """
    cells = []
    for value, low, high in zip(table[column], table["low"], table["high"]):
        half = (high - low) / 2
        digits = 3
        if 0 < half < 0.001:
            digits = min(6, -math.floor(math.log10(half)))  # else the interval would look like 0
        cell = f"{value:.{digits}f}"
        if not math.isnan(half):
            cell += f" ± {half:.{digits}f}"
        cells.append(cell)
    return table.assign(**{column: cells}).drop(columns=["low", "high"])


def format_cell(x):
    """A cell of a Markdown table. None and NaN are a dash."""
    if x is None or x != x or x == "nan":
        return "–"
    if isinstance(x, bool):
        return "yes" if x else "no"
    if isinstance(x, (int, np.integer)):
        return f"{x:,}"
    if isinstance(x, float):
        return f"{x:,.0f}" if 1000 <= abs(x) < math.inf else f"{x:.4g}"
    return str(x).replace("|", "\\|")


def to_markdown(table):
    """A data frame as a Markdown table, without its index."""
    rows = [list(table.columns), ["---"] * table.shape[1]]
    for record in table.to_dict("records"):
        rows.append([format_cell(x) for x in record.values()])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# -----------------------------------------------------------------------------
# files


def to_plain(x):
    """What JSON does not know: numpy's numbers, and paths and the like, which become text."""
    return x.item() if isinstance(x, np.generic) else str(x)


def to_json(head, runs):
    """head, a dict, with the entry "runs" as its last one: each run on a line of its own."""
    compact = dict(separators=(",", ":"), default=to_plain)
    lines = [json.dumps(run, **compact) for run in runs]
    first = json.dumps(head, **compact).removesuffix("}")
    return first + ',"runs":[\n' + ",\n".join(lines) + "\n]}\n"


def publish(out, name, title, tables, runs, conditions, figure=None, command=None):
    """Prints the tables, and writes them to the folder `out` as name.md, with name.json and
    name.png beside it.

    tables: {heading: data frame}. runs: a list of dicts, one for each run or each timing. They go
    into the JSON, and everything in the tables can be computed from them again. conditions: a dict
    of what a number is quoted with; "machine" in it is that of the runs, else it is this one.
    figure: matplotlib's. command: what made the result, by default the command of this process.

    inf and NaN stand in the JSON as Infinity and NaN. That is Python's own dialect: json.loads
    gives the same numbers back, where null could not say which of the two it was.
    """
    if command is None:
        in_notebook = "ipykernel_launcher" in sys.orig_argv  # whose command says nothing
        command = "notebook.ipynb" if in_notebook else shlex.join(["python", *sys.orig_argv[1:]])
    head = dict(title=title, command=command)
    head |= dict(commit=commit(), date=time.strftime("%Y-%m-%d"), machine=platform.platform())
    head |= {key: conditions[key] for key in ("date", "machine") if key in conditions}
    parts = [f"# {title}"]
    for heading, table in tables.items():
        parts.append(f"## {heading}\n\n{to_markdown(table)}")
    if figure is not None:
        parts.append(f"![{title}]({name}.png)")
    said = conditions | {key: head[key] for key in ("machine", "date", "commit")}
    parts.append("\n".join(f"- {key}: {value}" for key, value in said.items()))
    parts.append(f"    {head['command']}")
    text = "\n\n".join(parts) + "\n"
    print(f"\n{text}")  # first, so that a full disk can't take it away

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    (out / f"{name}.json").write_text(to_json(head | dict(conditions=conditions), runs))
    if figure is not None:
        figure.savefig(out / f"{name}.png")
    print(f"-> {out / name}.md")


# -----------------------------------------------------------------------------
# figures


def new_figure(rows=1, columns=1, width=6, height=4, **subplots):
    """A figure of our one style, and a flat array of its axes. width and height are in inches.

        figure, (left, right) = new_figure(columns=2, width=9, sharey=True)
    """
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    # the letters grow with the figure, so that they can be read when a page shows it small: at 415
    # pixels they are 11 pixels high, whatever the width is here
    size = 2 * width
    rcParams.update({
        "font.size": size,
        "axes.titlesize": size,
        "legend.fontsize": 0.9 * size,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#E6E6E6",
        "savefig.dpi": 150,
    })
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **subplots)
    return figure, axes.flatten()


def colors(arms):
    """{arm: its colour}. "diff no norm" has that of "diff"."""
    found = {}
    others = 0
    for arm in arms:
        found[arm] = COLORS.get(arm.split()[0])
        if found[arm] is None:
            found[arm] = OTHER_COLORS[others % len(OTHER_COLORS)]
            others += 1
    return found


def dots(ax, runs, table, value="loss"):
    """A row for each arm of the table of means, from the top: a dot for each run, and the mean with
    its interval. An arm whose mean is inf has the word "diverged"."""
    color = colors(table["arm"])
    for height, row in enumerate(table.to_dict("records")):
        losses = runs.loc[runs["arm"] == row["arm"], value]
        losses = losses[np.isfinite(losses)]
        ax.plot(losses, [height] * len(losses), "o", color=color[row["arm"]], alpha=0.5)
        if math.isinf(row["mean"]):
            ax.text(0.99, height, "diverged", transform=ax.get_yaxis_transform(),
                    ha="right", va="center")
            continue
        half = row["high"] - row["mean"]
        known = None if math.isnan(half) else half
        ax.errorbar(row["mean"], height, xerr=known, fmt="|", color="black", markersize=14,
                    capsize=4)
    ax.set_yticks(range(len(table)), table["arm"])
    ax.set_ylim(len(table) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
