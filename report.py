"""
Publishes a result, its tables and its figure together, and does the statistics over seeds for it.

    runs = pd.DataFrame(results)        # a line for each run: row (which arm it is), seed, loss
    noise = Noise(runs)
    rows = runs["row"].unique()
    table = pd.DataFrame([{"row": row, "loss": noise.mean(row)} for row in rows])
    figure, (ax,) = new_figure()
    dot_plot(ax, runs, "loss", row="row")
    ax.set(xlabel="val loss, nats per byte")
    add_title(figure, "The difference gains nothing")
    about = conditions(device) | noise.sentences()
    publish(Path("out"), "toy", about, {"Val loss by arm": table}, figure, runs)
"""
import json
import math
import platform
import re
import shlex
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Okabe and Ito's colours, which every kind of eye can tell apart. A dashed line stands for the
# difference of two maps.
STYLE = {
    "softmax": dict(color="#0072B2", linestyle="-"),
    "diff": dict(color="#D55E00", linestyle="--"),
    "linear": dict(color="#009E73", linestyle="-"),
    "diff_linear": dict(color="#CC79A7", linestyle="--"),
}
OTHER_COLORS = ["#000000", "#E69F00", "#56B4E9", "#777777"]  # for what is not one of the four
MARKERS = ["o", "s", "^", "D", "v", "X"]

# large letters and few lines, so that a figure can still be read at half its size
LOOK = {
    "font.size": 13,
    "axes.titlesize": 14,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "savefig.dpi": 150,
}


class MeanError(NamedTuple):
    """A mean or a median, and what stands behind its ±. The caption says which error that is.

    MeanError(1.25, 0.01) is shown as "1.250 ± 0.010", and without an error (NaN) as "1.250".
    """

    mean: float
    error: float


# statistics


def pooled_sd(runs):
    """The standard deviation of a run around the mean of its row, and its degrees of freedom.

    The squared distances of all rows are added up and divided by the sum of the rows' n - 1. Runs
    without a loss are left out. The standard deviation is NaN where no row has two runs.

        runs = pd.DataFrame(dict(row=["a", "a", "b", "b"], loss=[1.0, 3.0, 5.0, 5.0]))
        pooled_sd(runs)     # (1.0, 2): (1 + 1 + 0 + 0) / (1 + 1)
    """
    runs = runs.dropna(subset=["loss"])
    rows = runs.groupby("row")["loss"]
    dof = len(runs) - rows.ngroups
    if dof == 0:
        return math.nan, 0
    distance = runs["loss"] - rows.transform("mean")
    return math.sqrt((distance**2).sum() / dof), dof


def half_width(sd, dof, *counts, level=0.95):
    """Half of an interval (Student's t) of a mean of n runs, or of the difference of two means.

    Two means are not paired: arms that share a seed share their first weights and their data, and
    yet pairing them took nothing off the noise.

        half_width(0.01, 12, 3)         # of a mean of 3 runs: 2.18 * 0.01 * sqrt(1/3) = 0.0126
        half_width(0.01, 12, 3, 5)      # of a difference: 2.18 * 0.01 * sqrt(1/3 + 1/5) = 0.0159
    """
    from scipy import stats

    if dof == 0 or 0 in counts:
        return math.nan
    standard_error = sd * math.sqrt(sum(1 / n for n in counts))
    return float(stats.t.ppf((1 + level) / 2, dof) * standard_error)


class Noise:
    """How much the runs of one row differ, and so what can be said of means and of differences.

    runs: a data frame with a line for each run and the columns `row`, `loss` and perhaps `pool`.
    The standard deviation of a run around the mean of its row is pooled over the rows. Where some
    rows are louder than others, the column `pool` says which of them share a standard deviation.

        noise = Noise(pd.DataFrame(dict(row=list("aabb"), loss=[1.0, 1.2, 2.0, 2.2])))
        noise.difference("b", "a")      # MeanError(1.0, 0.61)
    """

    def __init__(self, runs):
        self.runs = runs if "pool" in runs else runs.assign(pool="all rows")
        self.pools = {}  # {pool: (standard deviation, degrees of freedom)}
        for pool, group in self.runs.groupby("pool", sort=False):
            self.pools[pool] = pooled_sd(group)

    def half_width(self, *groups, level=0.95):
        """Half of an interval of the mean of a row's runs, or of the difference of two such means.

        Rows of two pools get Welch's interval. The variance of their difference is
        s_a^2 / n_a + s_b^2 / n_b, and the degrees of freedom are Satterthwaite's. With one pool
        this is Student's interval.
        """
        parts = {}  # what each pool adds to the variance of the mean or the difference
        for group in groups:
            pool = group["pool"].iloc[0]
            sd, dof = self.pools[pool]
            if dof == 0:  # no row of this pool has two runs
                return math.nan
            parts[pool] = parts.get(pool, 0) + sd**2 / len(group)
        variance = sum(parts.values())
        if variance == 0:  # no run differs, and below there would be nothing to divide by
            return 0.0
        shares = [part**2 / self.pools[pool][1] for pool, part in parts.items()]
        return half_width(math.sqrt(variance), variance**2 / sum(shares), 1, level=level)

    def losses(self, row):
        """The runs of a row that have a loss."""
        return self.runs[self.runs["row"] == row].dropna(subset=["loss"])

    def mean(self, row):
        """The mean loss of a row with its 95 % interval, or None if no run has a loss."""
        a = self.losses(row)
        if a.empty:
            return None
        return MeanError(float(a["loss"].mean()), self.half_width(a))

    def difference(self, row, base, level=0.95):
        """The mean loss of a row less that of the row `base`, with its interval of that level. It
        is None if one of them has no run with a loss."""
        a = self.losses(row)
        b = self.losses(base)
        if a.empty or b.empty:
            return None
        mean = float(a["loss"].mean() - b["loss"].mean())
        return MeanError(mean, self.half_width(a, b, level=level))

    def sentences(self):
        """For each pool, how loud it is and how far apart two means must be. For publish's about.

            noise.sentences()   # {"noise of all rows": "the sd of a run is 0.0040 (4 degrees ..."}
        """
        said = {}
        for pool, (sd, dof) in self.pools.items():
            text = "unknown, because no row has two runs"
            if dof:
                # for rows with all of their seeds. a row that lacks some needs a larger difference
                runs = self.runs[self.runs["pool"] == pool]
                n = int(runs.groupby("row")["loss"].count().max())
                text = (
                    f"the sd of a run is {sd:.4f} ({dof} degrees of freedom), so two means of {n} "
                    f"runs must differ by {half_width(sd, dof, n, n):.3f} to be told apart at 95 %"
                )
            said[f"noise of {pool}"] = text
        return said


# conditions and files


def device_name(device):
    """The hardware of a result: the card's name, or the processor's and the number of threads.

        device_name(torch.device("cpu"))    # "cpu (Intel(R) Xeon(R) Processor), 2 threads"
    """
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():  # on Linux, where platform does not know the model
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        if found:
            name = found[1]
    return f"cpu ({name}), {torch.get_num_threads()} threads"


def conditions(device, **more):
    """The conditions of a result: the machine, PyTorch's version, the date, and `more`.

        conditions(torch.device("cpu"), steps=500, seeds="3 to 7")
    """
    import torch

    about = dict(device=device_name(device), torch=str(torch.__version__))
    about["date"] = time.strftime("%Y-%m-%d")
    return about | more


def check_can_publish(out):
    """Fails now, and not after hours of work, if publish would: with OSError if the folder `out`
    can't be written to, and with ImportError if a library is missing.

        check_can_publish(args.out)     # the first line of a main()
    """
    import matplotlib
    import pandas
    import scipy

    out.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=out).close()


def format_cell(x):
    """A cell of a Markdown table. None and NaN are a dash.

        format_cell(MeanError(0.0314, 0.01)), format_cell(12345.6)      # "0.031 ± 0.010", "12,346"
    """
    if isinstance(x, MeanError):
        digits = 3
        if abs(x.mean) >= 1000:
            digits = 0
        elif 0 < x.error < 0.001:
            digits = min(6, -math.floor(math.log10(x.error)))  # else the error would look like 0
        known = [f"{value:,.{digits}f}" for value in x if not math.isnan(value)]
        return " ± ".join(known) or "–"
    if x is None or x != x:
        return "–"
    if isinstance(x, bool):
        return "yes" if x else "no"
    if isinstance(x, int):
        return f"{x:,}"
    if isinstance(x, float):
        return f"{x:,.0f}" if 1000 <= abs(x) < math.inf else f"{x:.4g}"
    return str(x).replace("|", "\\|")


def to_markdown(df):
    """A data frame as a Markdown table, without its index."""
    rows = [list(df.columns), ["---"] * df.shape[1]]
    for record in df.to_dict("records"):
        rows.append([format_cell(x) for x in record.values()])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def to_plain(x):
    """A cell as JSON holds it: a MeanError by name, null for what is not a number."""
    if isinstance(x, MeanError):
        return {"mean": to_plain(x.mean), "error": to_plain(x.error)}
    if isinstance(x, np.generic):
        x = x.item()
    if isinstance(x, float) and not math.isfinite(x):
        return None
    return x


def to_records(df):
    """A data frame as a list of plain dicts, one for each row."""
    records = []
    for record in df.to_dict("records"):
        records.append({column: to_plain(x) for column, x in record.items()})
    return records


def publish(out, name, about, tables, figure, runs=None):
    """Prints the tables and writes them to the folder `out` as <name>.md, .json and .png.

    about: the conditions, a dict. tables: a dict of captions and data frames. figure: matplotlib's.
    runs: a data frame with a row for each run (or each timing) behind the tables. It goes into the
    JSON only, so that everything in the tables can be computed again.

        publish(Path("out"), "toy", conditions(device), {"Val loss by arm": table}, figure, runs)
    """
    about = about | dict(command=shlex.join(["python", *sys.orig_argv[1:]]))
    text = "; ".join(f"{key}: {value}" for key, value in about.items())
    result = dict(about=about, tables={})  # what the JSON holds
    for caption, df in tables.items():
        text += f"\n\n{caption}\n\n{to_markdown(df)}"
        result["tables"][caption] = to_records(df)
    if runs is not None:
        result["runs"] = to_records(runs)
    print(f"\n{text}\n")  # printed first, so that a full disk can't take it away
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    (out / f"{name}.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
    figure.savefig(out / f"{name}.png")
    print(f"-> {out / name}.md, .json, .png")


# figures


def new_figure(rows=1, columns=1, size=(7, 4.5), **subplots):
    """A figure of our one style and a flat array of its axes. size: width and height in inches.

        figure, (left, right) = new_figure(columns=2, size=(10, 4.5), sharey=True)
    """
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update(LOOK)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **subplots)
    return figure, axes.flatten()


def add_title(figure, finding):
    """Writes what the figure shows above all of it, in as many lines as its width asks for.

        add_title(figure, "One map counts votes, the difference of two does not")
    """
    text = textwrap.fill(finding, int(figure.get_figwidth() / 0.115))  # inches a letter
    figure.suptitle(text, x=0.01, ha="left", fontsize=LOOK["axes.titlesize"], fontweight="bold")


def styles(labels):
    """{label: colour, line and marker}. The first word decides: "diff, no norm" looks like "diff".
    Labels of one colour get different markers.

        styles(["softmax", "diff", "diff, no norm"])["diff, no norm"]["marker"]     # "s"
    """
    found = {}
    others = 0
    used = {}  # how many labels have a colour by now
    for label in labels:
        style = STYLE.get(re.split("[ ,(]", label)[0])
        if style is None:
            style = dict(color=OTHER_COLORS[others % len(OTHER_COLORS)], linestyle="-")
            others += 1
        number = used.get(style["color"], 0)
        used[style["color"]] = number + 1
        found[label] = style | dict(marker=MARKERS[number % len(MARKERS)])
    return found


def line_plot(ax, df, x, y, by, seed=None, band=None):
    """Draws a line for each value of the column `by`. Call label_ends(ax) when the axes are final.

    seed: the column that tells runs apart that are averaged. Each run is a thin line, their mean is
    a thick one, where all of them have a value. Without it, df has one row for each line and x.
    band: the names of two columns, the lower and the upper end of a shaded interval.

        line_plot(ax, df, "context", "accuracy", by="arm", seed="seed")
        ax.set(xscale="log", xlabel="tokens of context", ylabel="accuracy")
        label_ends(ax)
    """
    look = styles(df[by].unique())
    for label, group in df.groupby(by, sort=False):
        style = look[label] | dict(markersize=5)
        group = group.sort_values(x, kind="stable")
        if seed is not None:
            for _, run in group.groupby(seed):
                ax.plot(run[x], run[y], linewidth=0.8, alpha=0.35, color=style["color"])
            # where a seed is missing, the mean of the others would make a step that no run has
            at_x = group.groupby(x)[y]
            complete = at_x.count() == group[seed].nunique()
            mean = at_x.mean()[complete]
        else:
            mean = group.set_index(x)[y]
        if band is not None:
            ax.fill_between(group[x], group[band[0]], group[band[1]], color=style["color"],
                            alpha=0.15, linewidth=0)
        ax.plot(mean.index, mean, linewidth=2.4, label=label, **style)


def short_numbers(axis):
    """Writes the ticks of a logarithmic axis as 20 k, 50 k, 100 k. It needs the final limits.

        short_numbers(ax.xaxis)
    """
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    digits = [1, 2, 5]
    if high / low < 4:  # a short axis needs more of them
        digits = range(1, 10)
    elif high / low < 10:
        digits = [1, 2, 3, 5, 7]
    axis.set_major_locator(LogLocator(subs=digits))
    axis.set_major_formatter(EngFormatter())
    axis.set_minor_formatter(NullFormatter())


def label_ends(ax):
    """Writes the label of each line at its right end, in its colour, so that there is no legend.
    Call it last, because it needs the final limits and scales."""
    ax.figure.draw_without_rendering()  # a layout, so that the height of the axes is known
    size = LOOK["font.size"] - 1
    line_height = 1.3 * size / 72 * ax.figure.dpi  # in pixels
    gap = line_height / ax.bbox.height
    to_axes = ax.transData + ax.transAxes.inverted()
    ends = []
    for line in ax.get_lines():
        points = line.get_xydata()
        if len(points) and not line.get_label().startswith("_"):
            x, y = to_axes.transform(points[-1])
            ends.append((min(max(y, 0), 1), x, line))
    ends.sort(key=lambda end: end[0])

    # labels that would lie on each other are pushed up, and at the top all of them down again
    heights = [y for y, _, _ in ends]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    ceiling = 1.0
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], ceiling)
        ceiling = heights[i] - gap

    for height, (y, x, line) in zip(heights, ends):
        # a thread leads from the end of the line to a label that was pushed away
        color = line.get_color()
        place = dict(xycoords="axes fraction", textcoords="axes fraction", annotation_clip=False)
        thread = dict(arrowstyle="-", color=color, linewidth=0.7, shrinkA=0, shrinkB=3,
                      relpos=(0, 0.5))  # it ends at the left of the label
        ax.annotate(line.get_label(), (x, y), xytext=(1.04, height), va="center", fontsize=size,
                    color=color, arrowprops=thread, **place)


def dot_plot(ax, df, value, row, condition=None, pool=None):
    """Draws a row for each value of the column `row`, from the top in the order of df. Each run is
    a dot at its `value`. An upright line is their mean, and a level one is the 95 % interval of the
    mean, from the standard deviation that is pooled over all groups.

    condition: a column of two values. The dots of the first are hollow, those of the second filled,
    and the first row says which is which.
    pool: a column that says which groups share a standard deviation. A table that is made by a
    Noise with the same pools has the same intervals as the figure.

        figure, (ax,) = new_figure(size=(7, 1.5 + 0.5 * n_arms))
        dot_plot(ax, runs, "loss", row="arm", condition="decay")
        ax.set(xlabel="val loss, nats per byte")
        add_title(figure, "Decay helps each arm")

        runs = runs.assign(pool=runs["decay"].map({True: "with decay", False: "without"}))
        dot_plot(ax, runs, "loss", row="arm", condition="decay", pool="pool")
    """
    df = df.dropna(subset=[value])
    if condition is None:  # then it is the same for all runs
        df = df.assign(condition="")
        condition = "condition"
    # here both columns together say which runs are averaged
    groups = df[row] + ", " + df[condition].astype(str)
    pools = "all groups" if pool is None else df[pool]
    noise = Noise(df.assign(row=groups, loss=df[value], pool=pools))
    rows = list(df[row].unique())
    levels = list(df[condition].unique())
    look = styles(rows)
    for (label, level), runs in df.groupby([row, condition], sort=False):
        hollow = len(levels) == 2 and level == levels[0]
        above = -0.17 if hollow else 0.17  # upwards is negative: the first row is on top
        height = rows.index(label) + (above if len(levels) == 2 else 0)
        color = look[label]["color"]
        mean, error = noise.mean(f"{label}, {level}")
        ax.scatter(runs[value], [height] * len(runs), s=36, linewidths=1.2, edgecolors=color,
                   facecolors="white" if hollow else color, alpha=0.6, zorder=4)
        ax.errorbar(mean, height, xerr=error, color=color, linewidth=2, capsize=4, zorder=3)
        ax.plot(mean, height, marker="|", markersize=15, markeredgewidth=2.6, color=color, zorder=3)
        if len(levels) == 2 and label == rows[0]:
            kind = "hollow" if hollow else "filled"
            right = max(runs[value].max(), mean + error)
            ax.annotate(f"{kind}: {level}", (right, height), xytext=(10, 0), va="center",
                        textcoords="offset points", fontsize=LOOK["font.size"] - 2)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_ylim(len(rows) - 0.4, -0.8)
    ax.grid(axis="y", visible=False)
