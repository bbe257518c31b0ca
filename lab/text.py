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
from lab.compare import TEXT_JSON, Results, read_runs
from lab.toys import AS_DRAWN, FEW, FORTY, THREE_SEEDS, Cell

# a larger model on another text, "one size up". text.md has the command of these runs
ONE_SIZE_UP = dict(text="addresses", steps=1500, size="2.7 M")

# for each table of a page: a row, the one that it is compared to, and on which seeds
COMPARISONS = {
    ("text.md", "answer"): [
        ("diff", "softmax", FEW),
        ("diff with its norm from 0.2", "softmax", FEW),
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
        ("diff with its norm from 0.2", "diff", FEW),
        ("diff with its norm from 0.2", "diff without its norm", FEW),
        ("diff with its norm from 0.2", "softmax with half the heads and a norm from 0.2", FEW),
    ],
    ("text.md", "comparisons"): [
        ("softmax with half the heads and a norm", "softmax with half the heads", FEW),
        # the second version: is it the minus, or the free sum of a row, which is a gate?
        ("diff_v2", "gate", FORTY),
        ("diff_v2 with rows that sum to 1", "diff_v2", FEW),
    ],
    ("text.md", "addresses"): [
        ("diff_v2", "softmax", THREE_SEEDS),
        ("gate", "softmax", THREE_SEEDS),
        ("gate", "diff_v2", THREE_SEEDS),
    ],
    ("linear.md", "answer"): [
        ("linear", "softmax", FEW),
        ("diff_linear", "linear with half the heads and a norm", FEW),
        ("linear with decay", "softmax with decay", FEW),
        ("diff_linear with decay", "linear with decay", FEW),
    ],
    ("linear.md", "comparisons"): [
        ("linear minus the average", "linear", FEW),
        ("diff_linear", "linear", FEW),
        ("linear with half the heads and a norm", "linear", FEW),
        ("linear with decay", "linear", FEW),
        ("linear with one head of span 4", "linear", FEW),
        ("linear with decay", "softmax", FEW),
        ("softmax with decay", "softmax", FEW),
    ],
}


def pairs_of(results, place):
    """[(name, losses of the row, losses of the other)] of a table, as far as there are runs."""
    where = ONE_SIZE_UP if place == ("text.md", "addresses") else {}
    found = []
    for row, base, seeds in COMPARISONS[place]:
        cells = [Cell(name, "tied", **where) for name in (row, base)]
        pair = results.pair(*cells, AS_DRAWN, seeds=seeds)
        if all(pair):
            found.append((f"{row} − {base}", *pair))
    return found


def how_sure(pairs):
    """A sentence: how many intervals exclude 0, as they are and by Bonferroni."""
    clear = []
    for level in (0.95, 1 - 0.05 / len(pairs)):
        found = [stats.difference(a, b, level) for _, a, b in pairs]
        clear.append(sum(abs(mean) > half for mean, half in found))
    return (f"Of {len(pairs)} differences {clear[0]} exclude 0, and {clear[1]} if corrected for "
            "their number (Bonferroni).")


def parts_of(results):
    """{page: {name of a part: its text}}: what is made of the runs."""
    pairs_at = {place: pairs_of(results, place) for place in COMPARISONS}
    all_pairs = [pair for pairs in pairs_at.values() for pair in pairs]
    parts = {"text.md": {}, "linear.md": {}}
    for (page, name), pairs in pairs_at.items():
        if pairs:
            lines = [stats.line_of_difference(*pair, of=len(all_pairs)) for pair in pairs]
            parts[page][name] = stats.markdown(lines)
    if all_pairs:
        parts["text.md"]["sure"] = how_sure(all_pairs)
    return parts


def print_tables():
    for page, parts in parts_of(Results(read_runs())).items():
        for name, text in parts.items():
            print(f"{page}: {name}\n\n{text}\n")


def publish():
    _, runs = stats.read_json(TEXT_JSON)
    for page, parts in parts_of(Results(runs)).items():
        stats.renew(stats.RESULTS / page, parts)


def main(argv=None):
    stats.run_verb("lab.text", __doc__, argv, tables=print_tables, publish=publish)


if __name__ == "__main__":
    main()
