"""
What the programs share: flags, means with intervals, tables, JSON files and figures.

A ± is always half of an interval, of 95 % unless a call says another level.
"""
import argparse
import json
import math
import os
import re
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results"  # the pages, with their data and figures
# Okabe and Ito's colours, which every kind of eye can tell apart
COLORS = {
    "softmax": "#0072B2",
    "softmax_average": "#56B4E9",
    "diff": "#D55E00",
    "diff_v2": "#E69F00",
    "linear": "#009E73",
    "linear_average": "#000000",
    "diff_linear": "#CC79A7",
    "gate": "#777777",
    "softmax with a norm": "#009E73",  # as linear, beside which it never stands
}


def parser(module, text):
    """A parser of command lines, whose help shows this text as it stands."""
    style = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m {module}", description=text, formatter_class=style)


def run_verb(module, text, argv, **verbs):
    """Calls the function that a command line names by its verb."""
    p = parser(module, text)
    p.add_argument("verb", choices=verbs)
    verbs[p.parse_args(argv).verb]()


def mean_interval(values):
    """(mean, half of its interval by Student's t). The half is nan for n < 2 or a value of inf."""
    from scipy.stats import sem, t

    mean = float(np.mean(values))
    if len(values) < 2 or not math.isfinite(mean):
        return mean, math.nan
    return mean, float(t.ppf(0.975, len(values) - 1) * sem(values))


def difference(a, b, level=0.95):
    """(mean of a - mean of b, half of its interval by Welch's t). The half is nan as above."""
    from scipy.stats import ttest_ind

    mean = float(np.mean(a)) - float(np.mean(b))
    if min(len(a), len(b)) < 2 or not math.isfinite(mean):
        return mean, math.nan
    # not paired where runs share a seed: that mostly takes little off the noise
    low, high = ttest_ind(a, b, equal_var=False).confidence_interval(level)
    return mean, float(high - low) / 2


def plus_minus(mean, half, digits=3):
    """Like "0.123 ± 0.004", or "0.123" where half is nan."""
    mean = round(mean, digits)
    if mean == 0:
        mean = 0.0  # it may be -0.0
    text = f"{mean:.{digits}f}"
    return text if math.isnan(half) else f"{text} ± {half:.{digits}f}"


def difference_text(a, b, of):
    """The difference of two lists of losses, like "0.123 ± 0.004", and bold if it is sure.

    It is sure if its interval excludes 0 after a correction for all differences of the page, of
    which there are so many (Bonferroni).
    """
    text = plus_minus(*difference(a, b))
    mean, half = difference(a, b, level=1 - 0.05 / of)
    return f"**{text}**" if abs(mean) > half else text


def line_of_difference(name, a, b, of):
    """A line of a table: the difference of two lists of losses, and n. of: see above."""
    return {"difference": name, "val loss": difference_text(a, b, of), "n": min(len(a), len(b))}


def markdown(rows):
    """A Markdown table of dicts that have the same keys, its columns."""
    lines = [rows[0], ["---"] * len(rows[0])]
    lines += [[str(row[column]) for column in rows[0]] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def renew(page, parts):
    """Write parts of a page anew, {name: text}: what stands from <!-- name --> to <!-- end -->.

    Numbers get the minus that prose has. ValueError if the page has no place for one of the parts.
    """
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        part = re.sub(r"(?<!\w)-(?=\d)", "−", part)
        place = rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)"
        text, count = re.subn(place, lambda _: f"{part}\n", text, count=1, flags=re.DOTALL)
        if count == 0:
            raise ValueError(f"{page} has no place for {name}")
    page.write_text(text, encoding="utf-8")
    print(f"-> {page}")


def write_json(path, about, runs):
    """Write {**about, "runs": [...]}, one run a line. A kill leaves the old file whole."""
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in about.items())
    lines = ",\n".join(json.dumps(run) for run in runs)
    with open(f"{path}.tmp", "w", encoding="utf-8") as f:
        f.write(f'{{{head}"runs": [\n{lines}\n]}}\n')
    os.replace(f"{path}.tmp", path)


def read_json(path):
    """(about, runs) of a file that write_json wrote."""
    with open(path, encoding="utf-8") as f:
        about = json.load(f)
    return about, about.pop("runs")


def new_figure(rows=1, columns=1, width=6, height=4):
    """A figure of our one style, and a flat array of its axes. width and height are in inches."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    size = 2 * width  # so letters are 11 pixels high where a page shows the figure 415 pixels wide
    rcParams.update({"font.size": size, "axes.titlesize": size, "legend.fontsize": 0.9 * size})
    rcParams.update({"axes.grid": True, "axes.axisbelow": True, "grid.color": "#E6E6E6"})
    rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 150})
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).flatten()
