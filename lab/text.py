"""
Does the difference of two maps gain on text? The tables of text.md and linear.md in lab/results.

    python -m lab.text tables     # prints the tables of the runs below out/toys
    python -m lab.text publish    # the pages' tables, from text.json

The question. The paper's form differs from softmax in four things at once: a second map with a
minus, half as many heads, an output norm, and a factor behind the norm. Each comparison below
changes one of them, or as few as can be.

The rows are those of lab/toys.py, with tied embeddings. `python -m lab.train_toys
--pieces="text; v2"` trains them. The published runs are older, and from a CPU.
"""
from lab import stats
from lab.toys import OUT, Cell, cell_of, read_runs
from lab.train_toys import FEW, FORTY

ADDRESSES = range(3, 6)  # seeds. text.md has the command of these runs

# for each table of a page: a row, the one that it is compared to, and on which seeds
COMPARISONS = {
    ("text.md", "answer"): [
        ("diff", "softmax", FEW),
        ("diff, norm from 0.2", "softmax", FEW),
        ("softmax minus the average", "softmax", FEW),  # is any minus enough?
        ("diff_v2", "softmax", FORTY),
        ("gate", "softmax", FORTY),
    ],
    ("text.md", "form"): [  # the paper's form, with more and more alike
        ("diff", "softmax with half the heads and a norm", FEW),
        ("diff", "diff without its second map", FEW),
        ("diff without its norm", "softmax with half the heads", FEW),
        ("diff", "diff without its norm", FEW),
        ("diff without its second map", "softmax with half the heads and a norm", FEW),
        ("diff, norm from 0.2", "diff", FEW),
        ("diff, norm from 0.2", "diff without its norm", FEW),
        ("diff, norm from 0.2", "softmax with half the heads and a norm from 0.2", FEW),
    ],
    ("text.md", "comparisons"): [
        ("softmax with half the heads and a norm", "softmax with half the heads", FEW),
        # the second version: is it the minus, or the free sum of a row, which is a gate?
        ("diff_v2", "gate", FORTY),
        ("diff_v2, rows sum to 1", "diff_v2", FEW),
        ("diff_v2, rows sum to 1", "a plus, rows sum to 1", FEW),
        ("diff_v2, addresses", "softmax, addresses", ADDRESSES),
        ("gate, addresses", "softmax, addresses", ADDRESSES),
        ("gate, addresses", "diff_v2, addresses", ADDRESSES),
    ],
    ("linear.md", "answer"): [
        ("linear", "softmax", FEW),
        ("diff_linear", "linear with half the heads and a norm", FEW),
        ("linear + decay", "softmax + decay", FEW),
        ("diff_linear + decay", "linear + decay", FEW),
    ],
    ("linear.md", "comparisons"): [
        ("linear minus the average", "linear", FEW),
        ("diff_linear", "linear", FEW),
        ("linear with half the heads and a norm", "linear", FEW),
        ("linear + decay", "linear", FEW),
        ("linear, one head of span 4", "linear", FEW),
        ("linear + decay", "softmax", FEW),
        ("softmax + decay", "softmax", FEW),
    ],
}


def losses_of(runs, row, seeds):
    """The losses of a row's runs that are reported, on these seeds."""
    return [run["val_loss"] for run in runs if run["row"] == row
            and run["purpose"] == "reported" and run["seed"] in seeds]


def compared(runs, comparisons):
    """(row, base, losses of the row, losses of the base) of each comparison that has runs"""
    for row, base, seeds in comparisons:
        a = losses_of(runs, row, seeds)
        b = losses_of(runs, base, seeds)
        if a and b:
            yield row, base, a, b


def table_of(runs, comparisons):
    """A line for each comparison. The differences are by Welch's t."""
    table = []
    for row, base, a, b in compared(runs, comparisons):
        difference = stats.plus_minus(*stats.difference(a, b))
        table.append({"row": row, "compared with": base, "difference": difference, "n": len(a)})
    return table


def how_sure(runs):
    """A sentence: how many intervals exclude 0, as they are and by Bonferroni."""
    pairs = [(a, b) for comparisons in COMPARISONS.values()
             for _, _, a, b in compared(runs, comparisons)]
    clear = []
    for level in (0.95, 1 - 0.05 / len(pairs)):
        found = [stats.difference(a, b, level) for a, b in pairs]
        clear.append(sum(abs(mean) > half for mean, half in found))
    return (f"Of {len(pairs)} differences {clear[0]} exclude 0, and {clear[1]} if corrected for "
            "their number (Bonferroni).")


def parts_of(runs):
    """{page: {name of a part: its text}}: what is made of the runs."""
    parts = {"text.md": {"sure": how_sure(runs)}, "linear.md": {}}
    for (page, name), comparisons in COMPARISONS.items():
        table = table_of(runs, comparisons)
        if table:
            parts[page][name] = stats.markdown(table)
    return parts


def print_tables():
    runs = [run for run in read_runs() if cell_of(run) == Cell(run["row"], "tied")]
    if not runs:
        raise SystemExit(f"no run below {OUT} is of these pages")
    for parts in parts_of(runs).values():
        print("\n\n".join(parts.values()))


def publish():
    _, runs = stats.read_json(stats.RESULTS / "text.json")
    for page, parts in parts_of(runs).items():
        stats.renew(stats.RESULTS / page, parts)


def main(argv=None):
    p = stats.parser("lab.text", __doc__)
    verbs = dict(tables=print_tables, publish=publish)
    p.add_argument("verb", choices=verbs)
    verbs[p.parse_args(argv).verb]()


if __name__ == "__main__":
    main()
