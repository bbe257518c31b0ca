"""
The minus in diff_v2: tables of minus.md in lab/results.

    python -m lab.minus tables     # prints the tables of the runs below out/toys
    python -m lab.minus publish    # the page's tables, from toys.json and text.json

The first compares the sign and its controls, and the last says what diff_v2's lead is worth in
steps. The runs are those of lab/train_toys.py. The table of matches is lab/matches.py's.
"""
import math
from statistics import fmean

import numpy as np

from lab.compare import TEXT_JSON, TOYS_JSON, Results, read_runs
from lab.stats import (
    RESULTS, difference, difference_text, line_of_difference, markdown, read_json, renew, run_verb,
)
from lab.toys import AS_DRAWN, FEW, FORTY, Cell

SIGN = [
    ("diff_v2", "softmax"), ("diff_v2 with a plus", "softmax"), ("diff_v2", "diff_v2 with a plus"),
    ("diff_v2", "diff_v2 with a smaller plus"),
]
OTHER_WAYS = [("two gated maps", "softmax"), ("diff_v2", "two gated maps")]
SUM_TO_1 = [("diff_v2 with rows that sum to 1", "diff_v2 with a plus and rows that sum to 1")]
LEAD_STEPS = (500, 2000, 8000)
ON_THE_PAGE = len(SIGN) + len(OTHER_WAYS) + len(SUM_TO_1) + len(LEAD_STEPS)  # differences


def differences(results, contrasts, seeds=FORTY):
    """Differences of rows with a tied output layer, each at its own rate."""
    table = []
    for rows in contrasts:
        pair = results.pair(*(Cell(row, "tied") for row in rows), AS_DRAWN, seeds=seeds)
        if all(pair):
            table.append(line_of_difference(" − ".join(rows), *pair, of=ON_THE_PAGE))
    return table


def steps_with_loss(losses, loss):
    """The steps after which softmax would have this loss: by a parabola of it in log steps.

    losses: {steps: loss}, of three numbers of steps.
    """
    x = np.log(list(losses))
    a, b, c = np.polyfit(x, list(losses.values()), 2)
    # of the two solutions, that on the side where the loss falls
    return float(np.exp((-b - math.sqrt(b * b - 4 * a * (c - loss))) / (2 * a)))


def table_of_lead(results):
    """What diff_v2's lead is worth: the further steps with which softmax would have its loss."""
    pairs = {}  # {steps: losses of diff_v2, losses of softmax}
    for steps in LEAD_STEPS:
        cells = [Cell(row, "tied", "stdlib", steps) for row in ("diff_v2", "softmax")]
        pairs[steps] = results.pair(*cells, AS_DRAWN)
    if not all(a for a, _ in pairs.values()):
        return []
    losses = {steps: fmean(softmax) for steps, (_, softmax) in pairs.items()}
    table = []
    for steps, pair in pairs.items():
        mean, half = difference(*pair)
        more = [100 * (steps_with_loss(losses, losses[steps] + lead) / steps - 1)
                for lead in (mean, mean + half, mean - half)]
        table.append({
            "steps": f"{steps:,}", "diff_v2 − softmax": difference_text(*pair, of=ON_THE_PAGE),
            "further steps of softmax, %": "{:.0f} ({:.0f} to {:.0f})".format(*more),
            "n": len(pair[0]),
        })
    return table


def parts_of(results, older):
    """{name: table} of the page. older: the runs of text.json, for rows that sum to 1."""
    return {
        "sign": differences(results, SIGN),
        "others": differences(results, OTHER_WAYS) + differences(older, SUM_TO_1, FEW),
        "lead": table_of_lead(results),
    }


def print_tables():
    results = Results(read_runs())
    for name, table in parts_of(results, results).items():
        if table:
            print(f"{name}\n\n{markdown(table)}\n")


def publish():
    parts = parts_of(*(Results(read_json(file)[1]) for file in (TOYS_JSON, TEXT_JSON)))
    renew(RESULTS / "minus.md", {name: markdown(table) for name, table in parts.items()})


def main(argv=None):
    run_verb("lab.minus", __doc__, argv, tables=print_tables, publish=publish)


if __name__ == "__main__":
    main()
