"""
What does the subtraction buy? A look-up among pairs (lab/pairs.py), on which a model trains in
seconds.

    python -m lab.lookup            # three models and the first picture: two minutes on one core
    python -m lab.lookup run        # trains all runs of both pages anew, for hours, and prints
                                    # the tables that they make. It can be stopped
    python -m lab.lookup publish    # the tables and figures of lookup.md and longer.md in
                                    # lab/results, from their published data

`run` writes out/lookup/lookup.json. To publish it, copy it to lab/results. A run is a line of JSON:
its settings, and for each test [% right, % that name the crowd], as read with its "own" lambda and
with "1".
"""
import math
from dataclasses import asdict
from pathlib import Path

import torch

from lab.pairs import MORE_PAIRS, RIGHT, SIZES, STEPS, Run, measure, score, shown_texts, train
from lab.stats import (
    COLORS, RESULTS, difference, markdown, new_figure, parser, read_json, renew, write_json,
)

SHOWN_RATES = {"softmax": 4.5e-3, "softmax_average": 2e-3, "diff": 2e-3}  # arms and rates
NAMES = {"softmax": "one map", "softmax_average": "minus the average", "diff": "difference"}
TITLES = {"softmax": "softmax: one map", "softmax_average": "minus the average",
          "diff": "diff: minus another map"}
CAPS = (1.5, 2.0, 2.5, 3.0, 3.5)
RATE_OF_CAP = {1.5: 4.5e-3, 2.5: 4.5e-3, 3.0: 2e-3, 3.5: 3e-3}  # of one map
FIVE, OTHER_FIVE, TEN = range(3, 8), range(8, 13), range(3, 13)  # seeds. 1 and 2 chose the rates
# the rows of the table of crowds
CROWDS = {
    **{NAMES[arm]: (dict(arm=arm, lr=lr), TEN) for arm, lr in SHOWN_RATES.items()},
    "`diff_v2`": (dict(arm="diff_v2", lr=4.5e-3), FIVE),
    "control: sum of two maps": (dict(arm="softmax_sum", lr=4.5e-3), FIVE),
    "control: minus the own value": (dict(arm="softmax_own", lr=4.5e-3), OTHER_FIVE),
    "no norm: minus the average": (dict(arm="softmax_average", lr=2e-3, norm=False), OTHER_FIVE),
    "no norm: difference": (dict(arm="diff", lr=2e-3, norm=False), OTHER_FIVE),
    "no norm: `diff_v2`": (dict(arm="diff_v2", lr=4.5e-3, norm=False), FIVE),
}
LONG = dict(lr=3e-3, train_pairs=[16, 256], keys=1024, values=512)  # the texts of the row "lengths"


def planned_runs():
    """[(row, Run)]: all that the pages report. A row "" stands in no table of rows."""
    plan = [(row, settings, seeds) for row, (settings, seeds) in CROWDS.items()]
    for tau in (*CAPS, None):
        for arm in NAMES:
            plan.append(("lengths", dict(arm=arm, tau=tau) | LONG, OTHER_FIVE))
    for lr in (3e-3, 4.5e-3):  # does the difference keep its minus at higher rates?
        for norm in (True, False):
            plan.append(("", dict(arm="diff", lr=lr, norm=norm), OTHER_FIVE))
    for tau, lr in RATE_OF_CAP.items():  # the border. At 2 it is that of the row "one map"
        plan.append(("border", dict(arm="softmax", tau=tau, lr=lr), FIVE))
    plan.append(("", dict(arm="softmax", lr=4.5e-3, heads=2), FIVE))
    plan.append(("", dict(arm="softmax", lr=3e-3, heads=4), FIVE))
    return [(row, Run(seed=seed, **settings)) for row, settings, seeds in plan for seed in seeds]


# ---- what is shown: three models, in the pictures and on the page to play with


def shown_models(tau=2.0, steps=STEPS):
    """{arm: a trained Reader}"""
    rates = SHOWN_RATES if tau == 2.0 else dict.fromkeys(SHOWN_RATES, 3e-3)
    return {arm: train(Run(arm, lr, tau=tau), steps) for arm, lr in rates.items()}


def shown_row(reader):
    """Right answers beside crowds of 0 to 48 pairs, and the weights of one query with 16."""
    row = asdict(reader.run) | {"lambda": reader.own_lambda()}
    row["right"] = [score(reader, shown_texts(m))[0] for m in range(SIZES[-1] + 1)]
    weights = reader.weights(shown_texts(16))[0, 0, 0].tolist()
    return row | dict(weights=[round(weight, 5) for weight in weights])


# ---- the figures

def draw_weights(shown, path):
    """The weights of one query on 64 pairs: a panel for each of the rows `shown`."""
    figure, axes = new_figure(1, len(shown), width=9, height=5)
    for ax, row in zip(axes, shown):
        weights = row["weights"]
        crowd = sum(weights[:16])  # they have one value, so they add up
        ax.bar(7.5, crowd, 16, color="#F3CFB3")
        ax.bar(range(64), weights, 1, color=["#D55E00"] * 16 + ["#888888"] * 48)
        ax.bar(RIGHT, weights[RIGHT], 3, color="#009E73")
        is_first = ax is axes[0]
        words = {0: ("16 wrong,\ntogether ", crowd), 46: ("the right\none ", weights[RIGHT])}
        for x, (name, weight) in words.items():
            text = f"{name if is_first else ''}{weight:.3f}".replace("-", "−")
            ax.text(x, max(weight, 0) + 0.004, text, fontsize=16)
        ax.set_title(TITLES[row["arm"]], fontsize=19 if len(shown) == 2 else 15)
        ax.set(xticks=[], xlim=(-4, 78), ylim=(-0.03, 0.3))
        ax.tick_params(labelleft=is_first)
    axes[0].set_ylabel("weight")
    figure.savefig(path)


def draw(folder, shown, runs=()):
    """The pictures of the rows `shown`. Dots are their arms among the runs, with other seeds."""
    draw_weights(shown, folder / "lookup-weights.png")
    draw_weights([shown[0], shown[2]], folder / "lookup-front.png")
    figure, (ax,) = new_figure(width=6, height=4.8)
    for row, line in zip(shown, ("-", "-", "--")):
        color = COLORS[row["arm"]]
        seeds = [shares(runs, "own", str(m), row=NAMES[row["arm"]]) for m in SIZES]
        ax.plot(SIZES, seeds, ".", color=color, alpha=0.5)
        ax.plot(row["right"], line, color=color, linewidth=3, label=NAMES[row["arm"]])
    ax.axvline(math.exp(2), color="black", linestyle=":")
    ax.text(math.exp(2) + 1, 50, "predicted for\none map: $e^{2}$ = 7.4", fontsize=10)
    ax.set(xlabel="wrong pairs that agree, of 64", ylabel="right answers, %", ylim=(-3, 103))
    ax.legend(loc="center right", frameon=False)
    figure.savefig(folder / "lookup.png")
    print(f"-> lookup-front.png, lookup-weights.png and lookup.png in {folder}")


# ---- the tables

def shares(runs, read, test, which="right", **settings):
    """The % of a test in each of the runs that have these settings.

    read: with the run's "own" lambda, or with "1". which: of answers that are "right", or that name
    the "crowd".
    """
    place = {"right": 0, "crowd": 1}[which]
    rows = [run for run in runs if settings.items() <= run.items()]
    return [run[read][test][place] for run in rows if test in run.get(read, {})]


def percent(found):
    """The mean of some %, with a digit more near 0 and 100."""
    found = [share for share in found if share is not None]  # older runs did not count a crowd
    if not found:
        return "–"
    mean = sum(found) / len(found)
    return f"{mean:.1f}" if 0.05 <= mean < 0.95 or 99 < mean < 99.95 else f"{mean:.0f}"


def answer_table(runs):
    """The first table of the page: beside crowds of growing size."""
    lines = []
    for name in NAMES.values():
        line = {"right, %, beside a crowd of": name}
        line |= {m: percent(shares(runs, "own", m, row=name)) for m in ("4", "8", "16", "48")}
        lines.append(line)
    return markdown(lines)


def crowd_table(runs):
    """Beside crowds, after training on texts of 64 pairs with a cap of 2."""
    lines = []
    for row in CROWDS:
        line = {"model": row}
        line |= {f"right, % ({m})": percent(shares(runs, "own", m, row=row)) for m in ("16", "48")}
        line["names the crowd, % (48)"] = percent(shares(runs, "own", "48", "crowd", row=row))
        line["right with λ = 1, % (48)"] = percent(shares(runs, "1", "48", row=row))
        lines.append(line | {"seeds": len(shares(runs, "own", "48", row=row))})
    return markdown(lines)


def length_table(runs):
    """Beside more pairs that agree, after training on texts of 16 to 256 pairs."""
    lines = []
    for more in (f"+{number}" for number in MORE_PAIRS):
        for arm, name in NAMES.items():
            line = {"learned λ/λ = 1": f"{int(more):,} more: {name}"}
            for tau in (*CAPS, None):
                settings = dict(row="lengths", arm=arm, tau=tau)
                cells = [percent(shares(runs, read, more, **settings)) for read in ("own", "1")]
                line[f"cap {tau}" if tau else "no cap"] = "/".join(cells)
            lines.append(line)
    return markdown(lines)


def border(run):
    """The crowd beside which half of the answers are right, on a line between two sizes.

    inf, if no crowd halves them.
    """
    for m, next_m in zip(SIZES, SIZES[1:]):
        more = run["own"][str(m)][0]
        fewer = run["own"][str(next_m)][0]
        if fewer < 50:
            return m + (more - 50) / (more - fewer) * (next_m - m)
    return math.inf


def border_table(runs):
    """The border of one map at each cap, beside what is predicted."""
    predicted = {"cap τ": "e^τ"}
    found = {"cap τ": "half of the answers are right beside"}
    plain = {"cap τ": "right without a crowd, %"}
    for tau in CAPS:
        row = "one map" if tau == 2.0 else "border"
        borders = [border(run) for run in runs if (run["row"], run["tau"]) == (row, tau)]
        plain[f"{tau:g}"] = percent(shares(runs, "own", "0", row=row, tau=tau))
        predicted[f"{tau:g}"] = f"{math.exp(tau):.1f}"
        found[f"{tau:g}"] = f"{min(borders):.1f} to {max(borders):.1f}" if borders else "–"
    return markdown([predicted, found, plain])


def lead(runs, more, read, tau):
    """The difference less the average in points, like "+10 ± 1", beside so many pairs more."""
    pair = [shares(runs, read, more, row="lengths", arm=arm, tau=tau)
            for arm in ("diff", "softmax_average")]
    return "{:+.0f} ± {:.0f}".format(*difference(*pair)) if all(pair) else "–"


def lead_table(runs):
    """The lead of the difference in longer texts, with lambda = 1 in both."""
    lines = []
    for number in MORE_PAIRS:
        line = {"beside": f"{number:,} more"}
        for tau in (*CAPS, None):
            line[f"cap {tau}" if tau else "no cap"] = lead(runs, f"+{number}", "1", tau)
        lines.append(line)
    return markdown(lines)


def tables_of(runs):
    """{page: {name: text}} of the tables of both pages."""
    return {
        "lookup.md": {"answer": answer_table(runs), "borders": border_table(runs),
                      "crowds": crowd_table(runs)},
        "longer.md": {"lead": lead_table(runs), "lengths": length_table(runs)},
    }


# ---- the programs

def publish():
    """Writes the tables into the pages, and draws their figures."""
    _, runs = read_json(RESULTS / "lookup.json")
    for page, tables in tables_of(runs).items():
        renew(RESULTS / page, tables)
    draw(RESULTS, read_json(RESULTS / "lookup-shown.json")[1], runs)


def run_all():
    """Trains the runs of both pages anew, into out/lookup. What is there is not repeated."""
    out = Path("out/lookup/lookup.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    about, runs = read_json(out) if out.exists() else (dict(torch=torch.__version__), [])
    settings = ["row", *asdict(Run("softmax"))]
    made = [{name: run[name] for name in settings} for run in runs]
    for row, run in planned_runs():
        planned = dict(row=row) | asdict(run)
        if planned in made:
            continue
        runs.append(planned | measure(train(run)))
        write_json(out, about, runs)
        print(f"-> {out}: {run.arm}, seed {run.seed}")
    for tables in tables_of(runs).values():
        print(*tables.values(), sep="\n\n", end="\n\n")


def show(steps=STEPS):
    """Trains the three models, and draws what a crowd does to them."""
    out = Path("out/lookup")
    out.mkdir(parents=True, exist_ok=True)  # before the work
    shown = [shown_row(reader) for reader in shown_models(steps=steps).values()]
    write_json(out / "lookup-shown.json", dict(torch=torch.__version__), shown)
    for row in shown:
        crowds = ", ".join(f"{row['right'][m]} beside {m}" for m in (0, 8, 16, 48))
        print(f"{NAMES[row['arm']]}: % right, by the number that agree: {crowds}")
    print(f"-> {out / 'lookup-shown.json'}")
    draw(out, shown)


def main(argv=None):
    p = parser("lab.lookup", __doc__)
    p.add_argument("verb", nargs="?", choices=("run", "publish"))
    verbs = {"run": run_all, "publish": publish, None: show}
    verbs[p.parse_args(argv).verb]()


if __name__ == "__main__":
    main()
