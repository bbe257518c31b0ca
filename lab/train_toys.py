"""
Trains the toys (lab/toys.py) of the pages on text, on the start, on linear attention and the minus.

    python -m lab.train_toys                    # all runs, below out/toys
    python -m lab.train_toys --pieces="start"   # some of them: see --help
    python -m lab.train_toys collect            # puts the runs below out/toys into toys.json in
                                                # lab/results, for good

It is made for a GPU: an H200 makes the runs in some twenty minutes. On a core 500 steps take three
minutes, and there are more than two thousand runs. It can be stopped, and goes on.

Each cell has a rate of its own, chosen on other seeds than those that are reported, because a loss
that was chosen for being small is not a fair one. `python -m lab.start tables`, and lab.text and
lab.minus, print what your runs say.
"""
from functools import partial

import torch

from lab import stats
from lab.toys import (
    AS_DRAWN, AT_EACH_RATE, CHOOSE_ON, FEW, FORTY, OUT, RATES, THREE_SEEDS, TOYS_JSON, TWELVE,
    TWENTY, Cell, Runs, cell_of, read_runs,
)

STDS = (1.0, AS_DRAWN)
BETWEEN = (*AT_EACH_RATE, "diff without its second map")  # at a std of 0.2, too
LONGER = (*BETWEEN, "diff with λ_init 0.8, without its second map")  # at more steps
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


def piece_start(row, device, at_once):
    """An output layer of its own, and an embedding that starts small or large."""
    runs = Runs(Cell(row, "own"), device, at_once)
    for std in STDS:
        best = runs.best_rate(std)
        runs.make("reported", [(std, best, seed) for seed in TWENTY])
        if row in AT_EACH_RATE:
            runs.make("each rate", [(std, rate, seed) for rate in RATES for seed in FEW])
    if row in BETWEEN:
        best = runs.best_rate(0.2)
        runs.make("reported", [(0.2, best, seed) for seed in TWENTY])


def piece_tied(row, choose_on, report_on, device, at_once):
    """Tied embeddings, as on the pages on text, on linear attention and on the minus."""
    runs = Runs(Cell(row, "tied"), device, at_once)
    best = runs.best_rate(AS_DRAWN, RATES[1:4], choose_on)
    runs.make("reported", [(AS_DRAWN, best, seed) for seed in report_on])


def piece_length(row, device, at_once):
    """2,000 steps over new text."""
    runs = Runs(Cell(row, "own", "stdlib", 2000), device, at_once)
    for std in STDS:
        best = runs.best_rate(std)
        runs.make("reported", [(std, best, seed) for seed in TWELVE])


def piece_size(row, device, at_once):
    """2.7 M parameters."""
    runs = Runs(Cell(row, "own", size="2.7 M"), device, max(1, at_once // 2))  # for its memory
    for std in STDS:
        best = runs.best_rate(std)
        runs.make("reported", [(std, best, seed) for seed in TWELVE])


def piece_lead(row, steps, choose_on, report_on, device, at_once):
    """What diff_v2's lead is worth, in steps."""
    runs = Runs(Cell(row, "tied", "stdlib", steps), device, at_once)
    best = runs.best_rate(AS_DRAWN, RATES[1:5], choose_on)
    runs.make("reported", [(AS_DRAWN, best, seed) for seed in report_on])


def pieces():
    """{name: a function of device and at_once}, the most important first."""
    found = {f"start: {row}": partial(piece_start, row) for row in START}
    found |= {f"v2: {row}": partial(piece_tied, row, CHOOSE_V2_ON, FORTY) for row in V2}
    found |= {f"length: {row}": partial(piece_length, row) for row in LONGER}
    for row in ("softmax", "diff_v2"):
        for steps in (500, 2000):
            found[f"lead: {row}, {steps} steps"] = partial(
                piece_lead, row, steps, CHOOSE_ON, TWELVE)
        found[f"lead: {row}, 8000 steps"] = partial(
            piece_lead, row, 8000, CHOOSE_ON[:1], THREE_SEEDS)
    found |= {f"size: {row}": partial(piece_size, row) for row in AT_EACH_RATE}
    found |= {f"text: {row}": partial(piece_tied, row, CHOOSE_ON, FEW) for row in TEXT}
    return found


def joined(runs, new):
    """All of these runs, of which a new one takes the place of its like."""
    found = {}
    for run in runs + new:
        found[cell_of(run), run["std"], run["lr"], run["seed"], run["at"]] = run
    return list(found.values())


def collect():
    about, runs = stats.read_json(TOYS_JSON)
    stats.write_json(TOYS_JSON, about, joined(runs, read_runs()))


def main(argv=None):
    p = stats.parser("lab.train_toys", __doc__)
    p.add_argument("verb", nargs="?", choices=["collect"])
    p.add_argument("--pieces", help="pieces to train, of start, v2, length, lead, size and text, "
                   "or one row of a piece, like 'start; v2: diff_v2' (all)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                   help="on a CPU models are trained one by one")
    p.add_argument("--at_once", type=int, default=24, help="models that are trained together")
    args = p.parse_args(argv)
    if args.verb == "collect":
        collect()
        return
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
