"""
The tables and figures of start.md and start-record.md in lab/results, from start.json.

    python -m lab.start_page tables     # prints the tables of the runs below out/start alone
    python -m lab.start_page publish    # the pages' tables and figures, from start.json
    python -m lab.start_page collect    # puts the runs below out/start into start.json, for good,
                                        # and what lab/stream.py, which has the other figure,
                                        # measured
"""
import json
from collections import Counter
from dataclasses import fields
from pathlib import Path
from statistics import fmean

from lab import stats
from lab.start import CHOOSE_ON, CHOOSE_V2_ON, FEW, OUT, RATES, SHOWN, V2, Cell
from lab.stats import RESULTS

STARTS = (0.05, 0.2, 1.0)  # the embedding's std, at its start
LOW = 5e-4  # an eighth of the rate that softmax, softmax with the norm and diff chose at std 1
# the contrasts: a row less another one. First the answer of the page
ANSWER = [
    ("each its own", None, [("diff", "softmax"), ("diff_v2", "softmax")]),
    (f"{LOW:g} for both", LOW, [("diff", "softmax"), ("softmax with a norm", "softmax")]),
]
# then the parts: maps, heads, norm and factor of an arm, which is compared to softmax
PARTS = {
    "softmax with a norm": (1, 4, "yes", ""),
    "softmax with a norm and the factor 0.2": (1, 4, "yes", "0.2"),
    "softmax with half the heads": (1, 2, "", ""),
    "diff without its second map": (1, 2, "yes", "1 − λ_init"),
    "diff with λ_init 0.8, without its second map": (1, 2, "yes", "0.2"),
    "diff without its norm": (2, 2, "", ""),
    "diff": (2, 2, "yes", "1 − λ_init"),
    "diff with λ_init 0.8": (2, 2, "yes", "0.2"),
    "diff_v2": (2, 4, "", ""),
    "softmax minus the average": (1, 4, "", ""),
}
FURTHER = ("softmax with a norm, minus the average", "gate", "softmax with diff_v2's MLP")
# then longer runs and larger models, and what the second map does
SETTINGS = {"2,000 steps": dict(text="stdlib", steps=2000), "2.7 M parameters": dict(size="2.7 M")}
IN_SETTINGS = [
    ("diff", "softmax"), ("softmax with a norm", "softmax"),
    ("diff with λ_init 0.8, without its second map", "softmax"),
]
SECOND_MAP = [
    ("500 steps", {}, ("diff", "diff without its second map")),
    ("500 steps", {}, ("diff without its norm", "softmax with half the heads")),
    ("500 steps", {},
     ("diff with λ_init 0.8", "diff with λ_init 0.8, without its second map")),
    ("2,000 steps", SETTINGS["2,000 steps"], ("diff", "diff without its second map")),
]
AT_RATES = [("diff", "softmax"), ("softmax with a norm", "softmax")]  # with one rate for both
ON_RECORD = ("further", "rates")  # the tables of start-record.md
DRAWN = (0.05, 1.0)
JSON = RESULTS / "start.json"
STREAM = Path("out/stream/stream.json")  # see lab/stream.py
COLORS = {"softmax": "#0072B2", "softmax with a norm": "#009E73", "diff": "#D55E00"}


class Data:
    """The runs of start.json, by machine, cell and embedding."""

    def __init__(self, runs):
        self.found = {}  # {(machine, cell, std): {rate: {seed: val loss}}}
        for run in runs:
            cell = Cell(**{field.name: run[field.name] for field in fields(Cell)})
            rates = self.found.setdefault((run["at"], cell, run["std"]), {})
            rates.setdefault(run["lr"], {})[run["seed"]] = run["val_loss"]
        at = Counter(run["at"] for run in runs)
        self.machines = [machine for machine, _ in at.most_common()]

    def at(self, cell, std, lr, machine):
        """The losses at this rate, of the seeds that were run at each rate."""
        losses = self.found.get((machine, cell, std), {}).get(lr, {})
        return [loss for seed, loss in losses.items() if seed in FEW]

    def reported(self, cell, std, machine):
        """(rate, losses): the rate that some seeds chose, and what the others gave."""
        rates = self.found.get((machine, cell, std), {})
        is_sign = cell.head == "tied" and cell.row in V2 and cell.text == "manual"
        chosen_on = CHOOSE_V2_ON if is_sign else CHOOSE_ON
        tried = {rate: [loss for seed, loss in losses.items() if seed in chosen_on]
                 for rate, losses in rates.items()}
        n = max(map(len, tried.values()), default=0)
        if n > 0:
            mean = {rate: fmean(losses) for rate, losses in tried.items() if len(losses) == n}
            rate = min(mean, key=mean.get)
        else:  # no run, or those of one rate, which was chosen on another machine
            rate = next(iter(rates), None)
        return rate, [loss for seed, loss in rates.get(rate, {}).items() if seed not in chosen_on]

    def pair(self, a, b, std, lr=None):
        """The losses of two cells on one machine, which has most runs of those that have both.

        lr: one rate for both. None: each at its own. ([], []) if no machine has both.
        """
        for machine in self.machines:
            if lr is None:
                pair = [self.reported(cell, std, machine)[1] for cell in (a, b)]
            else:
                pair = [self.at(cell, std, lr, machine) for cell in (a, b)]
            if all(pair):
                return pair
        return [], []


def words(rows):
    """The difference of two rows, like "diff − softmax"."""
    return " − ".join(rows)


def line_of(data, rows, level, lr=None, stds=STARTS, **where):
    """The cells of a line: the difference of two rows at each start, and n.

    level: of the interval that makes a difference bold if it excludes 0. where: see Cell.
    """
    line = {}
    ns = set()
    for std in stds:
        name = f"std {std:g}"
        line[name] = ""
        a, b = data.pair(*(Cell(row, "own", **where) for row in rows), std, lr)
        n = min(len(a), len(b))
        if n >= 3:
            text = stats.plus_minus(*stats.difference(a, b))
            mean, half = stats.difference(a, b, level)
            line[name] = f"**{text}**" if abs(mean) > half else text
            ns.add(n)
    return line | {"n": ", ".join(map(str, sorted(ns, reverse=True)))}


def differences(data, level=0.95):
    """{name: table} of the tables of differences. level: see line_of."""
    answer, parts, further, second_map, settings = [], [], [], [], []
    for name, lr, all_rows in ANSWER:
        for rows in all_rows:
            line = {"rate": name, "difference": words(rows)}
            answer.append(line | line_of(data, rows, level, lr))
    for row, (maps, heads, norm, factor) in PARTS.items():
        line = {"arm": row, "maps": maps, "heads": heads, "norm": norm, "factor": factor}
        parts.append(line | line_of(data, (row, "softmax"), level))
    for row in FURTHER:
        further.append({"arm": row} | line_of(data, (row, "softmax"), level))
    for name, setting, rows in SECOND_MAP:
        line = {"difference": words(rows), "setting": name}
        second_map.append(line | line_of(data, rows, level, **setting))
    for name, setting in SETTINGS.items():
        for rows in IN_SETTINGS:
            line = {"setting": name, "difference": words(rows)}
            settings.append(line | line_of(data, rows, level, stds=DRAWN, **setting))
    tables = dict(answer=answer, parts=parts, second_map=second_map, settings=settings,
                  further=further)
    return {name: [line for line in table if any(line.get(f"std {std:g}") for std in STARTS)]
            for name, table in tables.items()}


def line_of_softmax(data):
    """Its losses, with which all other arms are compared."""
    line = {"arm": "softmax: its loss", "maps": 1, "heads": 4, "norm": "", "factor": ""}
    for std in STARTS:
        _, losses = data.reported(Cell("softmax", "own"), std, data.machines[0])
        line[f"std {std:g}"] = f"{fmean(losses):.3f}" if losses else ""
    return line | {"n": ""}


def count(tables):
    """How many differences stand in these tables. Those that stand in two are counted once."""
    found = set()
    for line in (line for table in tables.values() for line in table):
        what = line.get("difference") or f"{line['arm']} − softmax"
        where = line.get("setting") or line.get("rate") or "each its own"
        found.update((what, where, std) for std in STARTS if line.get(f"std {std:g}"))
    return len(found)


def table_of_rates(data):
    """What one would see who tried one rate."""
    table = []
    for std in DRAWN:
        for rows in AT_RATES:
            line = {}
            for lr in RATES:
                a, b = data.pair(*(Cell(row, "own") for row in rows), std, lr)
                line[f"{lr:g}"] = stats.plus_minus(*stats.difference(a, b), digits=2) if a else ""
            if any(line.values()):
                table.append({"start": f"std {std:g}", "difference": words(rows)} | line)
    return table


def parts_of(data):
    """{name: text} of the tables of both pages, as far as there are runs for them."""
    n = count(differences(data))
    tables = differences(data, level=1 - 0.05 / max(n, 1))  # by Bonferroni
    tables["parts"] = [line_of_softmax(data), *tables["parts"]]
    tables["rates"] = table_of_rates(data)
    return {name: stats.markdown(table) for name, table in tables.items() if table}


# ---- the figures

def draw_rates(data, path):
    """Val loss against the rate, a panel for each start."""
    figure, axes = stats.new_figure(1, 2, width=9, height=5.5)
    for ax, std in zip(axes, DRAWN):
        for row in SHOWN:
            found = [data.at(Cell(row, "own"), std, lr, data.machines[0]) for lr in RATES]
            means = [fmean(losses) for losses in found]
            ax.plot(RATES, means, color=COLORS[row], linewidth=3, label=row)
            chosen, _ = data.reported(Cell(row, "own"), std, data.machines[0])
            ax.plot(chosen, means[RATES.index(chosen)], "o", markersize=16, markeredgewidth=3,
                    markeredgecolor=COLORS[row], markerfacecolor="none")
            for lr, losses in zip(RATES, found):
                ax.plot([lr] * len(losses), losses, "o", color=COLORS[row], alpha=0.4)
        ax.set(xscale="log", title=f"embedding's std {std:g}", ylim=(1.47, 2.15))
        ax.set_xticks([5e-4, 2e-3, 8e-3], ["0.0005", "0.002", "0.008"], minor=False)
        ax.set_xticks([], minor=True)
        ax.set_xlabel("learning rate")
    axes[0].set_ylabel("val loss, nats a byte\n(lower is better)")
    axes[0].legend(frameon=False, loc="upper center")
    figure.savefig(path)


def read_runs():
    """The runs below out/start."""
    files = sorted(OUT.glob("*.jsonl"))
    if not files:
        raise SystemExit(f"there are no runs below {OUT}: python -m lab.start run makes them")
    return [json.loads(line) for file in files
            for line in file.read_text(encoding="utf-8").splitlines()]


def joined(runs, new):
    """All of these runs, of which a new one takes the place of its like."""
    found = {}
    for run in runs + new:
        cell = tuple(run[field.name] for field in fields(Cell))
        found[cell, run["std"], run["lr"], run["seed"], run["at"]] = run
    return list(found.values())


def print_tables():
    for name, text in parts_of(Data(read_runs())).items():
        print(f"{name}\n\n{text}\n")


def publish():
    _, runs = stats.read_json(JSON)
    data = Data(runs)
    parts = parts_of(data)
    record = {name: parts.pop(name) for name in ON_RECORD}
    stats.renew(RESULTS / "start-record.md", record)
    stats.renew(RESULTS / "start.md", parts)
    draw_rates(data, RESULTS / "start-rates.png")


def collect():
    about, runs = stats.read_json(JSON)
    if STREAM.exists():
        about["stream"] = stats.read_json(STREAM)[1]
    stats.write_json(JSON, about, joined(runs, read_runs()))


def main(argv=None):
    p = stats.parser("lab.start_page", __doc__)
    verbs = dict(tables=print_tables, publish=publish, collect=collect)
    p.add_argument("verb", choices=verbs)
    verbs[p.parse_args(argv).verb]()


if __name__ == "__main__":
    main()
