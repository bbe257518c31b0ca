"""
A result as a table, a figure and data: compares arms over their seeds, and publishes the three.

A ± is always half of a 95 % interval. A run that diverged has the loss inf, and so its arm has the
mean inf: the runs that are left may be the better ones.
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


def need(package):
    """UserError if a package of the lab is missing. A program asks before its work, not after."""
    if find_spec(package) is None:
        raise UserError(f"{package} is missing: pip install -r lab/requirements.txt")


def means(runs, value="loss"):
    """The mean of each arm's runs with its 95 % interval (Student's t), in the order of the runs.

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
    return pd.DataFrame(rows)


def compare(runs, pairs, level=0.95):
    """The difference of the mean losses of two arms with its interval (Welch), for each pair.

    pairs: tuples of an arm and the one that it is compared to. Returns a data frame: arm, base,
    difference, low, high. The last two are NaN as in means. Arms that share a seed are not paired:
    that took nothing off the noise.
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
        difference = a.mean() - b.mean()
        rows.append(dict(arm=arm, base=base, difference=difference, low=low, high=high))
    return pd.DataFrame(rows, columns=["arm", "base", "difference", "low", "high"])


def plus_minus(table, column):
    """The table of means or compare for a page: low and high become a ± behind the `column`."""
    cells = []
    for value, half in zip(table[column], (table["high"] - table["low"]) / 2):
        digits = 3
        if 0 < half < 0.001:
            digits = min(6, -math.floor(math.log10(half)))  # else the interval would look like 0
        cell = f"{value:.{digits}f}"
        cells.append(cell if math.isnan(half) else f"{cell} ± {half:.{digits}f}")
    return table.assign(**{column: cells}).drop(columns=["low", "high"])


def average(runs, by, values):
    """A row for each combination of the columns `by`, arm among them: n, and the means with ±."""
    import pandas as pd

    table = []
    for key, group in runs.groupby(by, sort=False):
        row = dict(zip(by, key)) | {"n": len(group)}
        for value in values:
            row[value] = plus_minus(means(group, value), "mean")["mean"].item()
        table.append(row)
    return pd.DataFrame(table)


def format_cell(x):
    """A cell of a Markdown table. None and NaN are a dash."""
    if x is None or x != x:
        return "–"
    if isinstance(x, int):
        return f"{x:,}"
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def to_markdown(table):
    rows = [list(table.columns), ["---"] * table.shape[1]]
    for record in table.to_dict("records"):
        rows.append([format_cell(x) for x in record.values()])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def conditions_of(runs):
    """What the numbers of train.py's runs are quoted with. runs: the heads of their logs."""
    import pandas as pd

    runs = pd.DataFrame(runs)
    head = runs.iloc[0]
    return {
        "machine": head["device_name"],
        "torch": head["torch"],
        "precision": head["dtype"],
        "data": head["data"],
        "length": f"{head['steps']:,} steps of {head['total_batch']:,} tokens",
        "seeds": ", ".join(map(str, runs["seed"].unique())),
        "±": "half of a 95 % interval: Student's t for a mean, Welch's for a difference",
        "commit of the runs": ", ".join(sorted(set(map(str, runs["commit"])))),
    }


def publish(out, name, title, tables, runs, conditions, figure, command=None):
    """Prints the tables, and writes name.md, name.json and name.png to the folder `out`.

    tables: {heading: data frame}. runs: a list of dicts, one for each run, for the JSON (in which
    Infinity and NaN stand as Python writes them). conditions: what a number is quoted with. The
    "machine" in it is that of the runs, else it is this one. command: by default this process's.
    """
    if command is None:
        in_notebook = "ipykernel_launcher" in sys.orig_argv  # whose command says nothing
        command = "notebook.ipynb" if in_notebook else shlex.join(["python", *sys.orig_argv[1:]])
    said = dict(machine=platform.platform()) | conditions
    said |= dict(date=time.strftime("%Y-%m-%d"), commit=commit())
    parts = [f"# {title}"]
    for heading, table in tables.items():
        parts.append(f"## {heading}\n\n{to_markdown(table)}")
    parts.append(f"![{title}]({name}.png)")
    parts.append("\n".join(f"- {key}: {value}" for key, value in said.items()))
    parts.append(f"    {command}")
    text = "\n\n".join(parts) + "\n"
    print(f"\n{text}")  # first, so that a full disk can't take it away

    head = json.dumps(dict(title=title, command=command) | said)
    lines = ",\n".join(json.dumps(run) for run in runs)  # a run is a line
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    (out / f"{name}.json").write_text(f'{head[:-1]}, "runs": [\n{lines}\n]}}\n')
    figure.savefig(out / f"{name}.png")
    print(f"-> {out / name}.md")


def new_figure(rows=1, columns=1, width=6, height=4, **subplots):
    """A figure of our one style, and a flat array of its axes. width and height are in inches."""
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
        "axes.axisbelow": True,  # the grid lies behind bars
        "grid.color": "#E6E6E6",
        "savefig.dpi": 150,
    })
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **subplots)
    return figure, axes.flatten()


def dots(ax, runs, value="loss"):
    """A row for each arm, from the top: a dot for each run, and the mean with its interval.

    An arm whose mean is inf has the word "diverged". "diff no norm" has the colour of "diff".
    """
    table = means(runs, value)
    for height, (arm, _, mean, low, _) in enumerate(table.itertuples(index=False)):
        losses = runs.loc[runs["arm"] == arm, value]
        losses = losses[np.isfinite(losses)]
        color = COLORS.get(arm.split()[0], "#777777")
        ax.plot(losses, [height] * len(losses), "o", color=color, alpha=0.5)
        if math.isinf(mean):
            side = ax.get_yaxis_transform()
            ax.text(0.99, height, "diverged", transform=side, ha="right", va="center")
        else:
            style = dict(fmt="|", color="black", markersize=14, capsize=4)
            ax.errorbar(mean, height, xerr=mean - low, **style)
    ax.set_yticks(range(len(table)), table["arm"])
    ax.set_ylim(len(table) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
