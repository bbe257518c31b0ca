"""
Does the difference of two maps gain on text? And what does it owe to its parts?

    python -m lab.text run        # trains what is missing below out/text, for many hours, and
                                  # prints the tables that its runs make
    python -m lab.text publish    # the tables of text.md and linear.md, from text.json

The question. The paper's form differs from softmax in four things at once: a second map with a
minus, half as many heads, an output norm, and a factor behind the norm. Each comparison below
changes one of them, or as few as can be.

The arms are those of model.py and lab/arms.py, with 0.8 M parameters each. They read the 0.4 MB of
Python's manual 2.5 times, in 500 steps. Each row has a rate of its own, chosen on other seeds than
those that are reported, because a loss that was chosen for being small is not a fair one.
"""
import math
import statistics
from pathlib import Path

import train
from data import load_manual, load_sequences
from lab import arms, losses, stats
from model import GPT

arms.register()
FLAGS = "--preset=toy --eval_every=250 --device=cpu --dtype=float32"  # of all rows
ROWS = {
    "softmax": "--attn=softmax",
    "softmax with half the heads": "--attn=softmax --n_head=2",
    "softmax with half the heads and a norm": "--attn=softmax --n_head=2 --subln=1",
    "softmax with half the heads and a norm from 0.2": "--attn=softmax --n_head=2 --subln=0.2",
    "diff without its second map": "--attn=softmax_factor --n_head=2",
    "diff": "--attn=diff",
    "diff without its norm": "--attn=diff --subln=0",
    "diff, norm from 0.2": "--attn=diff --subln=0.2",
    "softmax minus the average": "--attn=softmax_average",
    "diff_v2": "--attn=diff_v2",
    "diff_v2, rows sum to 1": "--attn=diff_v2_minus",
    "a plus, rows sum to 1": "--attn=diff_v2_plus",
    "gate": "--attn=gate",
    "linear": "--attn=linear",
    "linear with half the heads and a norm": "--attn=linear --n_head=2 --subln=1",
    "linear minus the average": "--attn=linear_average",
    "diff_linear": "--attn=diff_linear",
    "linear, one head of span 4": "--attn=linear_one_short_head",
    "softmax + decay": "--attn=softmax_decay",
    "linear + decay": "--attn=linear_decay",
    "diff_linear + decay": "--attn=diff_linear_decay",
}
LINEAR = [row for row in ROWS if "linear" in row]

FEW = range(3, 8)  # the seeds that are reported
MANY = range(8, 48)
ADDRESSES = range(3, 6)

# for each table of a page: a row, the one that it is compared to, and on which seeds
COMPARISONS = {
    ("text.md", "answer"): [
        ("diff", "softmax", FEW),
        ("diff, norm from 0.2", "softmax", FEW),
        ("softmax minus the average", "softmax", FEW),  # is any minus enough?
        ("diff_v2", "softmax", MANY),
        ("gate", "softmax", MANY),
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
        ("diff_v2", "gate", MANY),
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
ALL = [comparison for table in COMPARISONS.values() for comparison in table]

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
CHOOSE_ON = range(1, 3)  # the seeds on which a row's rate is chosen


def reported_seeds(row):
    """The seeds of all comparisons that need the row."""
    seeds = set()
    for one, base, those in ALL:
        if row in (one, base):
            seeds.update(those)
    return sorted(seeds)


def do_run(row, rate, seed, purpose, out):
    """Trains one run, or what is missing of it. Returns what the JSON says of it."""
    folder = out / row / f"lr{rate:g}-seed{seed}"
    print(f"\n{row}, seed {seed}, rate {rate:g}", flush=True)
    flags = f"{FLAGS} {ROWS[row]} --lr={rate} --seed={seed}"
    train.main([*flags.split(), f"--out={folder}"])
    (log,) = folder.glob("*/log.jsonl")  # the folder of the arm
    found = losses.read_run(log)
    run = dict(row=row, lr=rate, seed=seed, purpose=purpose,
               val_loss=found["val_loss"], parameters=found["parameters"])
    if math.isfinite(run["val_loss"]):  # else there may be no checkpoint
        text = load_sequences(load_manual()[1], range(16), found["block_size"])[:, :-1]
        model = GPT.load(log.parent / "ckpt.pt")
        run["lambda"] = train.lambdas(model, text)  # on val
    return run


def train_row(row, out):
    """All runs of a row: those that choose its rate, and those that are reported."""
    runs = []
    mean = {}
    for rate in RATES:
        tried = [do_run(row, rate, seed, "rate", out) for seed in CHOOSE_ON]
        mean[rate] = statistics.fmean(run["val_loss"] for run in tried)
        runs += tried
    best = min(mean, key=mean.get)
    return runs + [do_run(row, best, seed, "reported", out) for seed in reported_seeds(row)]


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
    pairs = [(a, b) for _, _, a, b in compared(runs, ALL)]
    clear = []
    for level in (0.95, 1 - 0.05 / len(pairs)):
        found = [stats.difference(a, b, level) for a, b in pairs]
        clear.append(sum(abs(mean) > half for mean, half in found))
    return (f"Of {len(pairs)} differences {clear[0]} exclude 0, and {clear[1]} if corrected for "
            "their number (Bonferroni).")


def lambdas_of(runs):
    """A line for each linear row that has lambda: at the end of its runs, in each layer."""
    table = []
    for row in LINEAR:
        found = [run["lambda"] for run in runs if run["row"] == row
                 and run["purpose"] != "rate" and run.get("lambda")]
        if found:
            means = " ".join(f"{statistics.fmean(layer):.2f}" for layer in zip(*found))
            lowest = f"{min(map(min, found)):.2f}"
            table.append({"row": row, "λ": means, "the lowest": lowest, "n": len(found)})
    return table


def parts_of(runs):
    """{page: {name of a part: its text}}: what is made of the runs."""
    tables = {place: table_of(runs, comparisons) for place, comparisons in COMPARISONS.items()}
    tables["linear.md", "lambdas"] = lambdas_of(runs)
    parts = {"text.md": {"sure": how_sure(runs)}, "linear.md": {}}
    for (page, name), table in tables.items():
        if table:
            parts[page][name] = stats.markdown(table)
    return parts


def run():
    out = Path("out/text")
    runs = [run for row in ROWS for run in train_row(row, out)]
    stats.write_json(out / "text.json", dict(flags=FLAGS, rows=ROWS), runs)
    for parts in parts_of(runs).values():
        print("\n\n".join(parts.values()))
    print(f"-> {out}")


def publish():
    _, runs = stats.read_json(stats.RESULTS / "text.json")
    for page, parts in parts_of(runs).items():
        stats.renew(stats.RESULTS / page, parts)


def main(argv=None):
    p = stats.parser("lab.text", __doc__)
    verbs = dict(run=run, publish=publish)
    p.add_argument("verb", choices=verbs)
    verbs[p.parse_args(argv).verb]()


if __name__ == "__main__":
    main()
