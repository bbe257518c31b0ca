"""
When does the difference pay? The tables and figures of start.md and start-record.md in lab/results.

    python -m lab.start tables     # prints the tables of the runs below out/toys alone
    python -m lab.start publish    # the pages' tables and figures, from start.json
    python -m lab.start collect    # puts the runs below out/toys into start.json, for good,
                                   # and what lab/stream.py, which has the other figure, measured

The runs are those of lab/train_toys.py.
"""
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from lab import stats
from lab.stats import RESULTS
from lab.toys import RATES, USUAL_STD, Cell, Data, cell_of, read_runs
from lab.train_toys import FEW, THREE

STARTS = (USUAL_STD, 0.2, 1.0)  # the embedding's std, at its start
IN_FIGURES = (USUAL_STD, 1.0)
LOW = RATES[0]  # an eighth of the rate that softmax, softmax with the norm and diff chose at std 1
SETTINGS_OF = {"500 steps": {}, "2,000 steps": dict(text="stdlib", steps=2000),
            "2.7 M parameters": dict(size="2.7 M")}
ON_RECORD = ("further", "rates")  # the tables of start-record.md
START_JSON = RESULTS / "start.json"
STREAM_JSON = Path("out/stream/stream.json")  # see lab/stream.py
ROW_COLORS = {"softmax": "#0072B2", "softmax with a norm": "#009E73", "diff": "#D55E00"}


@dataclass(frozen=True)
class Line:
    """A line of a table: a row less another one, at each start."""

    table: str
    labels: dict
    rows: tuple
    lr: float | None = None  # of both. None: each its own
    setting: str = "500 steps"
    stds: tuple = STARTS

    def where(self, std):
        """What is compared. Two lines may show the same."""
        return self.rows, self.lr, self.setting, std


def words(rows):
    """The difference of two rows, like "diff − softmax"."""
    return " − ".join(rows)


def lines():
    """All differences of both pages."""
    found = []
    for rate, lr, pairs in [
        ("each its own", None, [("diff", "softmax"), ("diff_v2", "softmax")]),
        (f"{LOW:g} for both", LOW, [("diff", "softmax"), ("softmax with a norm", "softmax")]),
    ]:
        for rows in pairs:
            found.append(Line("answer", {"rate": rate, "difference": words(rows)}, rows, lr))
    for arm, maps, heads, norm, factor in [
        ("softmax with a norm", 1, 4, "yes", ""),
        ("softmax with a norm and the factor 0.2", 1, 4, "yes", "0.2"),
        ("softmax with half the heads", 1, 2, "", ""),
        ("diff without its second map", 1, 2, "yes", "1 − λ_init"),
        ("diff with λ_init 0.8, without its second map", 1, 2, "yes", "0.2"),
        ("diff without its norm", 2, 2, "", ""),
        ("diff", 2, 2, "yes", "1 − λ_init"),
        ("diff with λ_init 0.8", 2, 2, "yes", "0.2"),
        ("diff_v2", 2, 4, "", ""),
        ("softmax minus the average", 1, 4, "", ""),
    ]:
        labels = dict(arm=arm, maps=maps, heads=heads, norm=norm, factor=factor)
        found.append(Line("parts", labels, (arm, "softmax")))
    for setting, rows in [
        ("500 steps", ("diff", "diff without its second map")),
        ("500 steps", ("diff without its norm", "softmax with half the heads")),
        ("500 steps", ("diff with λ_init 0.8", "diff with λ_init 0.8, without its second map")),
        ("2,000 steps", ("diff", "diff without its second map")),
    ]:
        labels = {"difference": words(rows), "setting": setting}
        found.append(Line("second_map", labels, rows, setting=setting))
    for setting in ("2,000 steps", "2.7 M parameters"):
        for arm in ("diff", "softmax with a norm", "diff with λ_init 0.8, without its second map"):
            labels = {"setting": setting, "difference": words((arm, "softmax"))}
            found.append(Line("settings", labels, (arm, "softmax"), setting=setting,
                              stds=IN_FIGURES))
    for arm in ("softmax with a norm, minus the average", "gate", "softmax with diff_v2's MLP"):
        found.append(Line("further", dict(arm=arm), (arm, "softmax")))
    return found


def cells_of(rows, **where):
    """The two cells of these rows, whose output layers are their own."""
    return [Cell(row, "own", **where) for row in rows]


def measured(data):
    """{what is compared: the losses of both} of all differences that have three seeds or more."""
    found = {}
    for line in lines():
        for std in line.stds:
            which = {} if line.lr is None else dict(lr=line.lr, seeds=FEW)
            cells = cells_of(line.rows, **SETTINGS_OF[line.setting])
            pair = data.pair(*cells, std, **which)
            if min(map(len, pair)) >= 3:
                found[line.where(std)] = pair
    return found


def tables_of_differences(pairs):
    """{name: a table} of what was measured. A difference is bold if it is sure: see lab/README."""
    level = 1 - 0.05 / max(len(pairs), 1)  # by Bonferroni
    tables = {}
    for line in lines():
        cells = {f"std {std:g}": "" for std in line.stds}
        ns = set()
        for std in line.stds:
            if line.where(std) in pairs:
                a, b = pairs[line.where(std)]
                text = stats.plus_minus(*stats.difference(a, b))
                mean, half = stats.difference(a, b, level)
                cells[f"std {std:g}"] = f"**{text}**" if abs(mean) > half else text
                ns.add(min(len(a), len(b)))
        if ns:
            n = ", ".join(map(str, sorted(ns, reverse=True)))
            tables.setdefault(line.table, []).append(line.labels | cells | {"n": n})
    return tables


def line_of_softmax(data):
    """Its losses, with which all other arms are compared."""
    line = {"arm": "softmax: its loss", "maps": 1, "heads": 4, "norm": "", "factor": ""}
    for std in STARTS:
        losses = data.losses(Cell("softmax", "own"), std)
        line[f"std {std:g}"] = f"{fmean(losses):.3f}" if losses else ""
    return line | {"n": ""}


def table_of_rates(data):
    """What one would see who tried one rate."""
    table = []
    for std in IN_FIGURES:
        for rows in ("diff", "softmax"), ("softmax with a norm", "softmax"):
            line = {}
            for lr in RATES:
                a, b = data.pair(*cells_of(rows), std, lr=lr, seeds=FEW)
                line[f"{lr:g}"] = stats.plus_minus(*stats.difference(a, b), digits=2) if a else ""
            if any(line.values()):
                table.append({"start": f"std {std:g}", "difference": words(rows)} | line)
    return table


def parts_of(data):
    """{name: text} of the tables of both pages, as far as there are runs for them."""
    tables = tables_of_differences(measured(data))
    if "parts" in tables:
        tables["parts"].insert(0, line_of_softmax(data))
    tables["rates"] = table_of_rates(data)
    return {name: stats.markdown(table) for name, table in tables.items() if table}


def draw_rates(data, path):
    """Val loss against the rate, a panel for each start. Rings: the rates that were chosen."""
    figure, axes = stats.new_figure(1, 2, width=9, height=5.5)
    for ax, std in zip(axes, IN_FIGURES):
        for row in THREE:
            cell = Cell(row, "own")
            color = ROW_COLORS[row]
            means = {}
            for lr in RATES:
                losses = data.losses(cell, std, lr=lr, seeds=FEW)
                means[lr] = fmean(losses)
                ax.plot([lr] * len(losses), losses, "o", color=color, alpha=0.4)
            ax.plot(means.keys(), means.values(), color=color, linewidth=3, label=row)
            chosen = data.reported(cell, std)[0]["lr"]
            ax.plot(chosen, means[chosen], "o", markersize=16, markeredgewidth=3,
                    markeredgecolor=color, markerfacecolor="none")
        ax.set(xscale="log", title=f"embedding's std {std:g}", ylim=(1.47, 2.15))
        ax.set_xticks([5e-4, 2e-3, 8e-3], ["0.0005", "0.002", "0.008"], minor=False)
        ax.set_xticks([], minor=True)
        ax.set_xlabel("learning rate")
    axes[0].set_ylabel("val loss, nats a byte\n(lower is better)")
    axes[0].legend(frameon=False, loc="upper center")
    figure.savefig(path)


def joined(runs, new):
    """All of these runs, of which a new one takes the place of its like."""
    found = {}
    for run in runs + new:
        found[cell_of(run), run["std"], run["lr"], run["seed"], run["at"]] = run
    return list(found.values())


def print_tables():
    for name, text in parts_of(Data(read_runs())).items():
        print(f"{name}\n\n{text}\n")


def publish():
    _, runs = stats.read_json(START_JSON)
    data = Data(runs)
    parts = parts_of(data)
    record = {name: parts.pop(name) for name in ON_RECORD}
    stats.renew(RESULTS / "start-record.md", record)
    stats.renew(RESULTS / "start.md", parts)
    draw_rates(data, RESULTS / "start-rates.png")


def collect():
    about, runs = stats.read_json(START_JSON)
    if STREAM_JSON.exists():
        about["stream"] = stats.read_json(STREAM_JSON)[1]
    stats.write_json(START_JSON, about, joined(runs, read_runs()))


def main(argv=None):
    p = stats.parser("lab.start", __doc__)
    verbs = dict(tables=print_tables, publish=publish, collect=collect)
    p.add_argument("verb", choices=verbs)
    verbs[p.parse_args(argv).verb]()


if __name__ == "__main__":
    main()
