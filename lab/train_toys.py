"""
Trains the toys (lab/toys.py) of the pages on text, on the start, on linear attention and the minus.

    python -m lab.train_toys                    # all runs, below out/toys
    python -m lab.train_toys --pieces="start"   # some of them: see --help

It is made for a GPU: an H200 makes the runs in some twenty minutes. On a core 500 steps take three
minutes, and there are more than two thousand runs. It can be stopped, and goes on.

Each cell has a rate of its own, chosen on other seeds than those that are reported, because a loss
that was chosen for being small is not a fair one. `python -m lab.start tables`, and lab.text and
lab.minus, print what your runs say.
"""
from functools import partial

import torch

from lab import stats
from lab.toys import CHOOSE_ON, OUT, RATES, USUAL_STD, Cell, Runs

STDS = (1.0, USUAL_STD)
THREE = ("softmax", "softmax with a norm", "diff")  # at each rate, and at more starts and sizes
BETWEEN = (*THREE, "diff without its second map")  # at a std of 0.2, too
LONGER = (*BETWEEN, "diff with λ_init 0.8, without its second map")  # at more steps
ONLY_RATES = ("diff with λ_init 0.8", "diff_v2")  # at more steps, on the seeds that choose
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
    "diff, norm from 0.2", "diff with λ_init 0.8", "diff with λ_init 0.8, without its second map",
    "diff_v2", "diff_v2, rows sum to 1", "a plus, rows sum to 1", "linear",
    "linear with half the heads and a norm", "linear minus the average",
    "linear, one head of span 4", "diff_linear", "softmax + decay", "linear + decay",
    "diff_linear + decay",
)
CHOOSE_V2_ON = tuple(range(48, 56))
FEW = tuple(range(3, 8))  # seeds that are reported
SOME = tuple(range(3, 15))
TWENTY = tuple(range(3, 23))
FORTY = tuple(range(8, 48))


def piece_start(row, device, at_once):
    """An output layer of its own, and an embedding that starts small or large."""
    runs = Runs(Cell(row, "own"), device, at_once)
    for std in STDS:
        best = runs.best_rate(std)
        runs.make("reported", [(std, best, seed) for seed in TWENTY])
        if row in THREE:
            runs.make("each rate", [(std, rate, seed) for rate in RATES for seed in FEW])
    if row in BETWEEN:
        best = runs.best_rate(0.2)
        runs.make("reported", [(0.2, best, seed) for seed in TWENTY])


def piece_text(row, device, at_once):
    """Tied embeddings, as on the pages on text and on linear attention."""
    runs = Runs(Cell(row, "tied"), device, at_once)
    best = runs.best_rate(USUAL_STD, RATES[1:4])
    runs.make("reported", [(USUAL_STD, best, seed) for seed in FEW])


def piece_v2(row, device, at_once):
    """The sign inside of diff_v2, and a gate, on more seeds."""
    runs = Runs(Cell(row, "tied"), device, at_once)
    best = runs.best_rate(USUAL_STD, RATES[1:4], seeds=CHOOSE_V2_ON)
    runs.make("reported", [(USUAL_STD, best, seed) for seed in FORTY])


def piece_length(row, device, at_once):
    """2,000 steps over new text."""
    runs = Runs(Cell(row, "own", "stdlib", 2000), device, at_once)
    for std in STDS:
        best = runs.best_rate(std)
        if row not in ONLY_RATES:
            runs.make("reported", [(std, best, seed) for seed in SOME])


def piece_size(row, device, at_once):
    """2.7 M parameters."""
    runs = Runs(Cell(row, "own", size="2.7 M"), device, max(1, at_once // 2))
    for std in STDS:
        best = runs.best_rate(std)
        runs.make("reported", [(std, best, seed) for seed in SOME])


def piece_lead(row, steps, device, at_once):
    """What diff_v2's lead is worth, in steps."""
    runs = Runs(Cell(row, "tied", "stdlib", steps), device, min(at_once, 12))
    best = runs.best_rate(USUAL_STD, RATES[1:5])
    runs.make("reported", [(USUAL_STD, best, seed) for seed in SOME])


def piece_long_lead(row, device, at_once):
    """The same after 8,000 steps, for which the rate is chosen on one seed."""
    runs = Runs(Cell(row, "tied", "stdlib", 8000), device, min(at_once, 16))
    best = runs.best_rate(USUAL_STD, RATES[1:5], seeds=CHOOSE_ON[:1])
    runs.make("reported", [(USUAL_STD, best, seed) for seed in FEW[:3]])


def pieces():
    """{name: a function of device and at_once}, the most important first."""
    found = {f"start: {row}": partial(piece_start, row) for row in START}
    found |= {f"v2: {row}": partial(piece_v2, row) for row in V2}
    found |= {f"length: {row}": partial(piece_length, row) for row in (*LONGER, *ONLY_RATES)}
    for row in ("softmax", "diff_v2"):
        for steps in (500, 2000):
            found[f"lead: {row}, {steps} steps"] = partial(piece_lead, row, steps)
        found[f"lead: {row}, 8000 steps"] = partial(piece_long_lead, row)
    found |= {f"size: {row}": partial(piece_size, row) for row in THREE}
    found |= {f"text: {row}": partial(piece_text, row) for row in TEXT}
    return found


def main(argv=None):
    p = stats.parser("lab.train_toys", __doc__)
    p.add_argument("--pieces", help="pieces to train, of start, v2, length, lead, size and text, "
                   "or one row of a piece, like 'start; v2: diff_v2' (all)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                   help="on a CPU models are trained one by one")
    p.add_argument("--at_once", type=int, default=24, help="models that are trained together")
    args = p.parse_args(argv)
    known = pieces()
    groups = {name.partition(":")[0] for name in known}
    wanted = [name.strip() for name in args.pieces.split(";")] if args.pieces else groups
    for name in wanted:
        if name not in known and name not in groups:
            p.error(f"there is no piece {name!r}")
    OUT.mkdir(parents=True, exist_ok=True)
    at_once = 1 if args.device == "cpu" else args.at_once
    for name, run in known.items():
        if name in wanted or name.partition(":")[0] in wanted:
            run(args.device, at_once)


if __name__ == "__main__":
    main()
