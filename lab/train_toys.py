"""
Trains the toys (lab/toys.py) of the pages on text, on the start, on linear attention and the minus.

    python -m lab.train_toys                    # all runs, below out/toys
    python -m lab.train_toys --pieces="start"   # some of them

The published runs, toys.json in lab/results, are the lines of several such folders.

It is made for a GPU: an H200 makes the runs in some twenty minutes. On a core 500 steps take three
minutes, and there are more than two thousand runs. It can be stopped, and goes on. A smaller GPU may
need --at_once=8.

Each cell has a rate of its own, chosen on other seeds than those that are reported, because a loss
that was chosen for being small is not a fair one. `python -m lab.start tables`, and lab.text and
lab.minus, print what your runs say.
"""
from functools import partial

import torch

from lab import stats
from lab.toys import (
    AS_DRAWN, AT_EACH_RATE, CHOOSE_ON, FEW, FORTY, OUT, RATES, THREE_SEEDS, TWELVE, TWENTY, Cell,
    Runs,
)

STDS = (1.0, AS_DRAWN)
BETWEEN = (*AT_EACH_RATE, "diff without its second map")  # at a std of 0.2, too
LIBRARY = ("softmax", "diff", "diff without its second map")  # on another text
CONTROLS = ("softmax minus a gated average", "diff_v2 with λ of free sign",
            "softmax with a norm and the factor 0.2", "softmax", "diff_v2")  # of diff_v2, tied
CONTROLS_UNTIED = ("diff_v2", "softmax minus a gated average",
                   "softmax with a norm and the factor 0.2")
V2 = ("softmax", "gate", "diff_v2", "diff_v2 with a plus", "diff_v2 with a smaller plus",
      "two gated maps")
START = (  # with an output layer of their own
    *BETWEEN, "softmax with half the heads", "softmax minus the average",
    "softmax with a norm, minus the average", "diff without its norm", "diff with λ_init 0.8",
    "diff with λ_init 0.8, without its second map", "softmax with a norm and the factor 0.2",
    "diff_v2", "gate", "softmax with diff_v2's MLP",
)
TEXT = (  # with tied embeddings
    "softmax", "softmax with a norm", "softmax with half the heads",
    "softmax with half the heads and a norm", "softmax with half the heads and a norm from 0.2",
    "softmax minus the average", "diff", "diff without its second map", "diff without its norm",
    "diff with its norm from 0.2", "diff with λ_init 0.8",
    "diff with λ_init 0.8, without its second map", "diff_v2",
    "diff_v2 with rows that sum to 1", "diff_v2 with a plus and rows that sum to 1", "linear",
    "linear with half the heads and a norm", "linear minus the average",
    "linear with one head of span 4", "diff_linear", "softmax with decay", "linear with decay",
    "diff_linear with decay",
)
CHOOSE_V2_ON = tuple(range(48, 56))
FINE = tuple(2e-3 * 2 ** (i / 2) for i in range(-1, 4))  # in factors of 2 a coin decides
MIDDLE = RATES[1:4]  # to begin with: the grid grows if the best one is at its edge


def train_cell(cell, stds, rates, choose_on, report_on, device, at_once):
    """For each start of the embedding: the rates, and at the best one the seeds to report."""
    runs = Runs(cell, device, at_once)
    for std in stds:
        best = runs.best_rate(std, rates, choose_on)
        runs.make("reported", [(std, best, seed) for seed in report_on])


def train_at_each_rate(cell, device, at_once):
    """Five seeds at each rate. First all that is reported, of which some of them are a part."""
    train_cell(cell, STDS, RATES, CHOOSE_ON, TWENTY, device, at_once)
    runs = Runs(cell, device, at_once)
    runs.make("each rate", [(std, rate, seed) for std in STDS for rate in RATES for seed in FEW])


def pieces():
    """{name: a function of device and at_once}, the most important first."""
    found = {}
    for row in START:
        stds = (*STDS, 0.2) if row in BETWEEN else STDS
        found[f"start: {row}"] = partial(
            train_cell, Cell(row, "own"), stds, RATES, CHOOSE_ON, TWENTY)
    for row in V2:
        found[f"v2: {row}"] = partial(
            train_cell, Cell(row, "tied"), [AS_DRAWN], MIDDLE, CHOOSE_V2_ON, FORTY)
    for row in AT_EACH_RATE:
        found[f"rates: {row}"] = partial(train_at_each_rate, Cell(row, "own"))
    for row in ("softmax", "diff_v2"):
        for steps in (500, 2000):
            found[f"library: {row}, {steps} steps"] = partial(
                train_cell, Cell(row, "tied", "library", steps), [AS_DRAWN], RATES[1:4],
                CHOOSE_ON, TWELVE)
    for row in LIBRARY:
        found[f"library: {row}, std 1"] = partial(
            train_cell, Cell(row, "own", "library", 2000), [1.0], RATES[1:4], CHOOSE_ON, TWELVE)
    for row in CONTROLS:
        found[f"controls: {row}"] = partial(
            train_cell, Cell(row, "tied"), [AS_DRAWN], FINE, CHOOSE_V2_ON, FORTY)
    for row in CONTROLS_UNTIED:
        found[f"controls: {row}, std 0.2"] = partial(
            train_cell, Cell(row, "own"), [0.2], FINE, CHOOSE_ON, TWENTY)
    for row in AT_EACH_RATE:
        found[f"size: {row}"] = partial(
            train_cell, Cell(row, "own", size="2.7 M"), STDS, RATES, CHOOSE_ON, TWELVE)
    for row in TEXT:
        found[f"text: {row}"] = partial(
            train_cell, Cell(row, "tied"), [AS_DRAWN], MIDDLE, CHOOSE_ON, FEW)
    return found


def main(argv=None):
    p = stats.parser("lab.train_toys", __doc__)
    p.add_argument("--pieces", help="pieces to train, of start, v2, rates, library, controls, size "
                   "and text, or one row of a piece, like 'start; v2: diff_v2' (all)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                   help="on a CPU models are trained one by one")
    p.add_argument("--at_once", type=int, default=24, help="models that are trained together")
    args = p.parse_args(argv)
    known = pieces()
    groups = {name.partition(":")[0] for name in known}
    wanted = [name.strip() for name in args.pieces.split(";")] if args.pieces else groups
    for name in wanted:
        if name not in known and name not in groups:
            p.error(f"there is no piece {name!r}. There are: {'; '.join(known)}")
    OUT.mkdir(parents=True, exist_ok=True)
    at_once = 1 if args.device == "cpu" else args.at_once
    for name, run in known.items():
        if name in wanted or name.partition(":")[0] in wanted:
            run(args.device, at_once)


if __name__ == "__main__":
    main()
