"""
When does the difference pay? The tables and a figure of start.md and start-record.md in
lab/results.

    python -m lab.start tables     # prints the tables of the runs below out/toys
    python -m lab.start publish    # the pages' tables and figure, from toys.json

The runs are those of lab/train_toys.py. The other figure is lab/stream.py's.
"""
from dataclasses import dataclass
from statistics import fmean

from lab import stats
from lab.compare import TOYS_JSON, Results, read_runs
from lab.stats import RESULTS
from lab.toys import AS_DRAWN, AT_EACH_RATE, FEW, RATES, Cell

STARTS = (AS_DRAWN, 0.2, 1.0)  # the embedding's std, at its start
TWO_STARTS = (AS_DRAWN, 1.0)
LOW = RATES[0]  # an eighth of the rate that softmax, softmax with the norm and diff chose at std 1
WHERE = {"500 steps": {}, "2,000 steps": dict(text="stdlib", steps=2000),
         "2.7 M parameters": dict(size="2.7 M")}
ON_RECORD = ("further", "rates")  # the tables of start-record.md


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


def lines_of_answer():
    for rate, lr, rows in [
        ("each its own", None, ("diff", "softmax")),
        ("each its own", None, ("diff_v2", "softmax")),
        (f"{LOW:g} for both", LOW, ("diff", "softmax")),
        (f"{LOW:g} for both", LOW, ("softmax with a norm", "softmax")),
    ]:
        yield Line("answer", {"rate": rate, "difference": words(rows)}, rows, lr)


def lines_of_parts():
    """Arms less softmax, with what they are made of."""
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
        yield Line("parts", labels, (arm, "softmax"))
    for arm in ("softmax with a norm, minus the average", "gate", "softmax with diff_v2's MLP"):
        yield Line("further", dict(arm=arm), (arm, "softmax"))


def lines_of_second_map():
    """Two maps less one map of the same heads, norm and factor."""
    for setting, rows in [
        ("500 steps", ("diff", "diff without its second map")),
        ("500 steps", ("diff without its norm", "softmax with half the heads")),
        ("500 steps", ("diff with λ_init 0.8", "diff with λ_init 0.8, without its second map")),
        ("2,000 steps", ("diff", "diff without its second map")),
    ]:
        labels = {"difference": words(rows), "setting": setting}
        yield Line("second_map", labels, rows, setting=setting)


def lines_of_settings():
    """Longer runs, and a larger model."""
    for setting, arm in [
        ("2,000 steps", "diff"),
        ("2,000 steps", "softmax with a norm"),
        ("2,000 steps", "diff with λ_init 0.8, without its second map"),
        ("2.7 M parameters", "diff"),
        ("2.7 M parameters", "softmax with a norm"),
    ]:
        rows = (arm, "softmax")
        labels = {"setting": setting, "difference": words(rows)}
        yield Line("settings", labels, rows, setting=setting, stds=TWO_STARTS)


LINES = [*lines_of_answer(), *lines_of_parts(), *lines_of_second_map(), *lines_of_settings()]


def cells_of(rows, **where):
    """The two cells of these rows, whose output layers are their own."""
    return [Cell(row, "own", **where) for row in rows]


def measured(results):
    """{what is compared: the losses of both} of all lines that have three seeds or more."""
    pairs = {}
    for line in LINES:
        for std in line.stds:
            which = {} if line.lr is None else dict(lr=line.lr, seeds=FEW)
            pair = results.pair(*cells_of(line.rows, **WHERE[line.setting]), std, **which)
            if min(map(len, pair)) >= 3:
                pairs[line.where(std)] = pair
    return pairs


def tables_of_differences(pairs):
    """{name: a table} of what was measured."""
    tables = {}
    for line in LINES:
        cells = {f"std {std:g}": "" for std in line.stds}
        ns = set()
        for std in line.stds:
            if line.where(std) in pairs:
                a, b = pairs[line.where(std)]
                cells[f"std {std:g}"] = stats.difference_text(a, b, of=len(pairs))
                ns.add(min(len(a), len(b)))
        if ns:
            n = ", ".join(map(str, sorted(ns, reverse=True)))
            tables.setdefault(line.table, []).append(line.labels | cells | {"n": n})
    return tables


def line_of_softmax(results):
    """Its losses, with which all other arms are compared."""
    line = {"arm": "softmax: its loss", "maps": 1, "heads": 4, "norm": "", "factor": ""}
    for std in STARTS:
        losses = results.losses(Cell("softmax", "own"), std)
        line[f"std {std:g}"] = f"{fmean(losses):.3f}" if losses else ""
    return line | {"n": ""}


def table_of_rates(results):
    """What one would see who tried one rate."""
    table = []
    for std in TWO_STARTS:
        for rows in ("diff", "softmax"), ("softmax with a norm", "softmax"):
            line = {}
            for lr in RATES:
                a, b = results.pair(*cells_of(rows), std, lr=lr, seeds=FEW)
                line[f"{lr:g}"] = stats.plus_minus(*stats.difference(a, b), digits=2) if a else ""
            if any(line.values()):
                table.append({"start": f"std {std:g}", "difference": words(rows)} | line)
    return table


def parts_of(results):
    """{name: text} of the tables of both pages, as far as there are runs for them."""
    tables = tables_of_differences(measured(results))
    if "parts" in tables:
        tables["parts"].insert(0, line_of_softmax(results))
    tables["rates"] = table_of_rates(results)
    return {name: stats.markdown(table) for name, table in tables.items() if table}


def draw_rates(results, path):
    """Val loss against the rate, a panel for each start. Rings: the rates that were chosen."""
    figure, axes = stats.new_figure(1, 2, width=9, height=5.5)
    for ax, std in zip(axes, TWO_STARTS):
        for row in AT_EACH_RATE:
            cell = Cell(row, "own")
            color = stats.COLORS[row]
            means = {}
            for lr in RATES:
                losses = results.losses(cell, std, lr=lr, seeds=FEW)
                means[lr] = fmean(losses)
                ax.plot([lr] * len(losses), losses, "o", color=color, alpha=0.4)
            ax.plot(means.keys(), means.values(), color=color, linewidth=3, label=row)
            chosen = results.runs(cell, std)[0]["lr"]
            ax.plot(chosen, means[chosen], "o", markersize=16, markeredgewidth=3,
                    markeredgecolor=color, markerfacecolor="none")
        ax.set(xscale="log", title=f"embedding's std {std:g}", ylim=(1.47, 2.15))
        ax.set_xticks([5e-4, 2e-3, 8e-3], ["0.0005", "0.002", "0.008"], minor=False)
        ax.set_xticks([], minor=True)
        ax.set_xlabel("learning rate")
    axes[0].set_ylabel("val loss, nats a byte\n(lower is better)")
    axes[0].legend(frameon=False, loc="upper center")
    figure.savefig(path)


def print_tables():
    for name, text in parts_of(Results(read_runs())).items():
        print(f"{name}\n\n{text}\n")


def publish():
    results = Results(stats.read_json(TOYS_JSON)[1])
    parts = parts_of(results)
    record = {name: parts.pop(name) for name in ON_RECORD}
    stats.renew(RESULTS / "start-record.md", record)
    stats.renew(RESULTS / "start.md", parts)
    draw_rates(results, RESULTS / "start-rates.png")


def main(argv=None):
    stats.run_verb("lab.start", __doc__, argv, tables=print_tables, publish=publish)


if __name__ == "__main__":
    main()
