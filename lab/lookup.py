"""
What does the subtraction buy? A look-up among pairs (lab/pairs.py), on which a model trains in
seconds.

    python -m lab.lookup            # three models and their pictures: two minutes on one core
    python -m lab.lookup run        # all 200 runs of findings.md: hours. It can be stopped
    python -m lab.lookup draw       # the published pictures, from the published runs

A run is a line of out/lookup/lookup.jsonl: its settings, and for each test [% right, % that name
the crowd], as read with its "own" lambda and with "1". `python -m lab.tables out/lookup` prints
what the runs say.
"""
import math
from dataclasses import asdict
from pathlib import Path

from lab.pairs import RIGHT, SIZES, STEPS, Run, measure, score, shown_texts, train
from lab.stats import COLORS, RESULTS, add_run, new_figure, one_line, parser, read_runs

OUT = Path("out/lookup")
SHOWN_RATES = {"softmax": 4.5e-3, "softmax_average": 2e-3, "diff": 2e-3}  # arms and rates
NAMES = {"softmax": "one map", "softmax_average": "minus the average", "diff": "difference"}
TITLES = {"softmax": "softmax: one map", "softmax_average": "minus the average",
          "diff": "diff: minus another map"}
CAPS = (1.5, 2.0, 2.5, 3.0, 3.5)
RATE_OF_CAP = {1.5: 4.5e-3, 2.5: 4.5e-3, 3.0: 2e-3, 3.5: 3e-3}  # of one map
FIVE, OTHER_FIVE, TEN = range(3, 8), range(8, 13), range(3, 13)  # seeds. 1 and 2 chose the rates
CROWDS = {  # what is tested beside crowds: its settings, and its seeds
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
    """[(row, Run)]: all that is reported. A row "" belongs to no group."""
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


def run_all():
    """Trains all runs. What is there is not repeated."""
    file = OUT / "lookup.jsonl"
    there = read_runs(file) if file.exists() else []
    settings = ["row", *asdict(Run("softmax"))]
    made = [{name: run[name] for name in settings} for run in there]
    for row, run in planned_runs():
        planned = dict(row=row) | asdict(run)
        if planned not in made:
            add_run(file, planned | measure(train(run)))
            print(f"-> {file}: {run.arm}, seed {run.seed}")


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


def show(steps=STEPS):
    """Trains the three models, and draws what a crowd does to them."""
    OUT.mkdir(parents=True, exist_ok=True)  # before the work
    (OUT / "shown.jsonl").unlink(missing_ok=True)
    shown = [shown_row(reader) for reader in shown_models(steps=steps).values()]
    for row in shown:
        add_run(OUT / "shown.jsonl", row)
        crowds = ", ".join(f"{row['right'][m]} beside {m}" for m in (0, 8, 16, 48))
        print(f"{NAMES[row['arm']]}: % right, by the number that agree: {crowds}")
    draw(OUT, shown)


# ---- the pictures

def draw_weights(shown, path):
    """The weights of one query on 64 pairs: a panel for each of the rows `shown`."""
    figure, axes = new_figure(1, len(shown), width=9, height=5)
    for ax, row in zip(axes, shown):
        weights = row["weights"]
        crowd = sum(weights[:16])  # they have one value, so they add up
        ax.bar(7.5, crowd, 16, color=COLORS["crowd, summed"])
        ax.bar(range(64), weights, 1, color=[COLORS["crowd"]] * 16 + [COLORS["other"]] * 48)
        ax.bar(RIGHT, weights[RIGHT], 3, color=COLORS["right"])
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
    print(f"-> {path}")


def draw_crowds(shown, path, runs=()):
    """Right answers by the size of the crowd. Dots are the same arms among runs of other seeds."""
    figure, (ax,) = new_figure(width=6, height=4.8)
    for row, line in zip(shown, ("-", "-", "--")):
        color = COLORS[row["arm"]]
        for run in runs:
            if run["row"] == NAMES[row["arm"]]:
                right = [run["own"][str(m)][0] for m in SIZES]
                ax.plot(SIZES, right, ".", color=color, alpha=0.5)
        ax.plot(row["right"], line, color=color, linewidth=3, label=NAMES[row["arm"]])
    ax.axvline(math.exp(2), color="black", linestyle=":")
    ax.text(math.exp(2) + 1, 50, "predicted for\none map: $e^{2}$ = 7.4", fontsize=10)
    ax.set(xlabel="wrong pairs that agree, of 64", ylabel="right answers, %", ylim=(-3, 103))
    ax.legend(loc="center right", frameon=False)
    figure.savefig(path)
    print(f"-> {path}")


def draw(folder, shown, runs=()):
    draw_weights(shown, folder / "lookup-weights.png")
    draw_crowds(shown, folder / "lookup.png", runs)


def draw_published():
    """The README's picture, and that of findings.md."""
    shown = read_runs(RESULTS / "lookup-shown.json")
    draw_weights([shown[0], shown[2]], RESULTS / "lookup-front.png")
    draw_crowds(shown, RESULTS / "lookup.png", read_runs(RESULTS / "lookup.json"))


def main(argv=None):
    p = parser("lab.lookup", __doc__)
    p.add_argument("verb", nargs="?", choices=("run", "draw"))
    verbs = {"run": run_all, "draw": draw_published, None: show}
    verbs[p.parse_args(argv).verb]()


if __name__ == "__main__":
    with one_line():
        main()
