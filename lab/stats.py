"""
What the programs share: the end of a program, means with intervals, files of runs and figures.

A ± is always half of an interval, of 95 % unless a call says another level.
"""
import argparse
import json
import math
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from cli import one_sentence
from model import Refused

RESULTS = Path(__file__).parent / "results"  # the published runs and figures
# the colours of all figures: Okabe and Ito's, which every kind of eye can tell apart
COLORS = {
    "softmax": "#0072B2",
    "softmax_average": "#56B4E9",
    "diff": "#D55E00",
    "diff_v2": "#E69F00",
    "linear": "#009E73",
    "linear_average": "#000000",
    "diff_linear": "#CC79A7",
    "right": "#009E73",  # of the pairs of a look-up: the right one, those that agree, the others
    "crowd": "#D55E00",
    "crowd, summed": "#F3CFB3",
    "other": "#888888",
}


# ---- programs

@contextmanager
def one_line():
    """Around a whole program: what its user has to change is one sentence, and so is Ctrl-C."""
    try:
        with one_sentence():
            yield
    except KeyboardInterrupt:
        sys.exit("\nstopped")


def parser(module, text):
    """A parser of command lines, whose help shows this text as it stands."""
    style = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m {module}", description=text, formatter_class=style)


# ---- statistics

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


def markdown(rows):
    """A Markdown table of dicts that have the same keys, its columns."""
    lines = [rows[0], ["---"] * len(rows[0])]
    lines += [[str(row[column]) for column in rows[0]] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---- files of runs

def read_runs(path):
    """The runs of a file: a .jsonl has one in a line, and a published .json has a head before them.

    Refused if a line is no run, such as the half of one that a full disk leaves.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        if Path(path).suffix == ".json":
            return json.loads(text)["runs"]
    except (OSError, ValueError, KeyError) as e:
        raise Refused(f"{path} can't be read as runs: {e!r:.200}") from e
    runs = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            runs.append(dict(json.loads(line)))
        except (ValueError, TypeError) as e:
            raise Refused(f"{path} has no run in line {number}: delete that line") from e
    return runs


def add_run(path, run):
    """Add a run to a file of lines."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as f:
        f.write(json.dumps(run) + "\n")


# ---- figures

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
