"""
The tables of findings.md, and that of times in README.md, from runs.

    python -m lab.tables               # of the published runs: the pages' own tables
    python -m lab.tables --write       # into the two pages
    python -m lab.tables out/toys      # the same tables from runs of yours, as far as they go
    python -m lab.tables out/lookup

DIFFERENCES is the list of what is compared. A comparison is made within one machine and one text.
"""
import json
import math
import re
from dataclasses import fields
from pathlib import Path
from statistics import fmean, median

from lab import pretrained
from lab.lookup import CAPS, NAMES
from lab.pairs import SIZES
from lab.stats import RESULTS, difference, markdown, one_line, parser, plus_minus, read_runs
from lab.toys import AS_DRAWN, FORTY, Cell
from model import Refused

PAGES = (Path(__file__).with_name("findings.md"), Path(__file__).with_name("README.md"))

# where two rows are compared: the head of a column, and which runs stand in it
PLACES = {
    "val loss": dict(head="tied", std=AS_DRAWN),
    "tied": dict(head="tied", std=AS_DRAWN, seeds=FORTY),
    "tied, std 0.05": dict(head="tied", std=AS_DRAWN),
    "untied, std 0.05": dict(head="own", std=AS_DRAWN),
    "untied, std 0.2": dict(head="own", std=0.2),
    "untied, std 1": dict(head="own", std=1.0),
    "2.7 M, untied, std 0.05": dict(head="own", size="2.7 M", std=AS_DRAWN),
    "2.7 M, untied, std 1": dict(head="own", size="2.7 M", std=1.0),
    "as many steps": dict(head="tied", std=AS_DRAWN, seeds=FORTY),
    "1.14 times as many": dict(head="tied", std=AS_DRAWN, seeds=FORTY, base_steps=570),
    "1.29 times as many": dict(head="tied", std=AS_DRAWN, seeds=FORTY, base_steps=645),
}
STARTS = ("tied, std 0.05", "untied, std 0.05", "untied, std 0.2", "untied, std 1")
ALL_STARTS = (*STARTS, "2.7 M, untied, std 0.05", "2.7 M, untied, std 1")
V2_STARTS = ("tied", "untied, std 0.05", "untied, std 1")
PRICE = ("as many steps", "1.14 times as many", "1.29 times as many")

DIFFERENCES = [  # table, row, the row that it is compared to, columns
    ("start", "diff", "softmax", ALL_STARTS),
    ("start", "diff with λ_init 0.8", "softmax", STARTS),
    ("start", "softmax with a norm", "softmax", ALL_STARTS),
    ("start", "softmax with half the heads", "softmax", STARTS),
    ("map", "diff", "diff without its second map", STARTS),
    ("map", "diff with λ_init 0.8", "diff with λ_init 0.8, without its second map", STARTS),
    ("map", "diff without its norm", "softmax with half the heads", STARTS),
    ("sign", "diff_v2", "softmax", V2_STARTS),
    ("sign", "softmax minus a gated average", "softmax", V2_STARTS),
    ("sign", "diff_v2", "softmax minus a gated average", V2_STARTS),
    ("sign", "diff_v2 with a plus", "softmax", V2_STARTS),
    ("sign", "diff_v2", "diff_v2 with a smaller plus", V2_STARTS),
    ("sign", "diff_v2", "two gated maps", V2_STARTS),
    ("sign", "gate", "softmax", V2_STARTS),
    ("sign", "softmax with a norm and the factor 0.2", "softmax", V2_STARTS),
    ("price", "diff_v2", "softmax", PRICE),
    ("linear", "linear", "softmax", ["val loss"]),
    ("linear", "linear with decay", "linear", ["val loss"]),
    ("linear", "linear with one head of span 4", "linear", ["val loss"]),
    ("linear", "linear with decay", "softmax with decay", ["val loss"]),
    ("linear", "linear with half the heads and a norm", "linear", ["val loss"]),
    ("linear", "diff_linear", "linear with half the heads and a norm", ["val loss"]),
]


# ---- runs of toys

class Results:
    """Runs by cell, the embedding's start and place: a machine and the hash of a text.

    (The published runs have no hash.) A run that is there twice, in a copy of a file, counts once.
    """

    def __init__(self, runs):
        self.groups = {}  # {(cell, std): {place: runs}}
        there = set()
        for run in runs:
            cell = Cell(**{field.name: run[field.name] for field in fields(Cell)})
            place = run["at"], run.get("data_hash")
            key = cell, run["std"], place, run["lr"], run["seed"]
            if key not in there:
                there.add(key)
                self.groups.setdefault((cell, run["std"]), {}).setdefault(place, []).append(run)

    def at(self, row, std, seeds=None, **where):
        """{place: {seed: loss}} of the runs that are reported. seeds: of these alone."""
        found = {}
        for place, runs in self.groups.get((Cell(row, **where), std), {}).items():
            for run in runs:
                if run["purpose"] == "reported" and (seeds is None or run["seed"] in seeds):
                    losses = found.setdefault(place, {})
                    if losses.setdefault(run["seed"], run["val_loss"]) != run["val_loss"]:
                        raise Refused(f"{row} has two reported rates on seed {run['seed']}")
        return found

    def pair(self, row, base, base_steps=500, **where):
        """The losses of two rows at one place, that with most seeds of both, or None.

        Of seeds that only one of them has, the losses count only if they share none.
        """
        a, b = self.at(row, **where), self.at(base, steps=base_steps, **where)
        places = sorted((place for place in a if place in b), key=str)
        shared = {place: a[place].keys() & b[place].keys() for place in places}
        if not shared:
            return None
        place = max(shared, key=lambda place: len(shared[place]))  # of equals a CPU
        return [[of_row[place][seed] for seed in sorted(shared[place] or of_row[place])]
                for of_row in (a, b)]


def differences(results):
    """{table: rows} of DIFFERENCES. Bold: sure after a correction for all that are measured."""
    pairs = {}
    for table, row, base, columns in DIFFERENCES:
        for column in columns:
            pair = results.pair(row, base, **PLACES[column])
            if pair is not None and min(map(len, pair)) > 1:
                pairs[table, row, base, column] = pair
    tables = {}
    for table, row, base, columns in DIFFERENCES:
        line = {"difference": f"{row} − {base}"}
        for column in columns:
            pair = pairs.get((table, row, base, column))
            line[column] = with_n(pair, of=len(pairs)) if pair else ""
        if any(line[column] for column in columns):
            rows = tables.setdefault(table, [line])
            if rows[-1] is not line:
                rows.append(dict.fromkeys(rows[0], "") | line)
    return tables


def with_n(pair, of):
    """Like "**0.041 ± 0.008** (20)". Bold: it excludes 0 as one of so many (Bonferroni)."""
    text = plus_minus(*difference(*pair))
    mean, half = difference(*pair, level=1 - 0.05 / of)
    text = f"**{text}**" if abs(mean) > half else text
    return f"{text} ({min(map(len, pair))})"


# ---- runs of the look-up

def shares(runs, test, **settings):
    """The % of right answers in a test, in each of the runs that have these settings."""
    return [run["own"][test][0] for run in runs
            if settings.items() <= run.items() and test in run["own"]]


def percent(found):
    """The mean of some %, with a digit more near 0 and 100."""
    if not found:
        return "–"
    mean = fmean(found)
    return f"{mean:.1f}" if 0.05 <= mean < 0.95 or 99 < mean < 99.95 else f"{mean:.0f}"


def crowds(runs):
    """Beside crowds of growing size, after training on texts of 64 pairs with the bound 2."""
    rows = []
    for row in (*NAMES.values(), "`diff_v2`"):
        line = {"right, %, beside a crowd of": row}
        line |= {m: percent(shares(runs, m, row=row)) for m in ("4", "8", "16", "48")}
        rows.append(line | {"n": len(shares(runs, "48", row=row))})
    return rows


def border(run):
    """The crowd beside which half of the answers are right, on a line between two sizes."""
    for m, next_m in zip(SIZES, SIZES[1:]):
        more, fewer = run["own"][str(m)][0], run["own"][str(next_m)][0]
        if fewer < 50:
            return m + (more - 50) / (more - fewer) * (next_m - m)
    return math.inf


def borders(runs):
    """The border of one map at each bound, beside what e^gap would be with the largest gap."""
    predicted, found = {"bound τ": "e^τ"}, {"bound τ": "half are right beside"}
    for tau in CAPS:
        row = "one map" if tau == 2.0 else "border"
        of_runs = [border(run) for run in runs if (run["row"], run["tau"]) == (row, tau)]
        predicted[f"{tau:g}"] = f"{math.exp(tau):.1f}"
        found[f"{tau:g}"] = f"{min(of_runs):.1f} to {max(of_runs):.1f}" if of_runs else "–"
    return [predicted, found]


def different(runs):
    """The runs without those that are there twice."""
    found = {}
    for run in runs:
        settings = {name: x for name, x in run.items() if name not in ("own", "1", "lambda")}
        found.setdefault(json.dumps(settings), run)
    return list(found.values())


# ---- times

def speed():
    """Times beside softmax's, of a step of GPT-2 small and of a layer, on one H200."""
    measured = json.loads((RESULTS / "h200.json").read_text(encoding="utf-8"))
    steps, layers = {}, {}
    for run in measured["step"]:
        steps.setdefault(run["arm"], []).append(run["ms"])
    for run in measured["layer_by_length_ms"]:
        layers[run["arm"]] = run
    rows = []
    for arm in sorted(steps, key=lambda arm: median(steps[arm])):
        line = {"arm": f"`{arm}`", "a step, ms": f"{median(steps[arm]):.1f}"}
        line["beside softmax's"] = f"{median(steps[arm]) / median(steps['softmax']):.2f}"
        for T in ("1024", "4096", "16384"):
            line[f"a layer, {int(T):,} tokens"] = f"{layers[arm][T] / layers['softmax'][T]:.2f}"
        rows.append(line)
    return rows


# ---- the program

def tables_of(runs):
    """{name: table} of what the runs, of toys or of the look-up, suffice for."""
    results = Results([run for run in runs if "head" in run])
    found = differences(results)
    lookups = different(run for run in runs if "own" in run)
    if lookups:
        found |= {"crowds": crowds(lookups), "borders": borders(lookups)}
    return {name: with_minus(markdown(rows)) for name, rows in found.items() if rows}


def with_minus(text):
    """Numbers get the minus that prose has."""
    return re.sub(r"(?<![\w-])-(?=\d)", "−", text)


def published():
    runs = []
    for name in ("toys", "text", "lookup"):
        runs += read_runs(RESULTS / f"{name}.json")
    tables = tables_of(runs) | {"speed": with_minus(markdown(speed()))}
    tables["pretrained"] = with_minus(pretrained.loss_table(pretrained.runs_by_cell()))
    return tables


def renew(text, tables):
    """A page with these tables: each stands from <!-- name --> to <!-- end -->."""
    for name, table in tables.items():
        place = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(place, rf"\g<1>{table}\n\g<2>", text, flags=re.DOTALL)
    return text


def main(argv=None):
    p = parser("lab.tables", __doc__)
    p.add_argument("folder", type=Path, nargs="?", help="of your runs (the published ones)")
    p.add_argument("--write", action="store_true", help="write the published ones into the pages")
    args = p.parse_args(argv)
    if args.folder is None:
        tables = published()
    else:
        files = sorted(args.folder.glob("*.jsonl"))
        if not files:
            raise Refused(f"there are no runs in {args.folder}: lab.toys and lab.lookup make them")
        tables = tables_of([run for file in files for run in read_runs(file)])
    if args.write and args.folder is None:
        for page in PAGES:
            page.write_text(renew(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
            print(f"-> {page}")
        return
    for name, table in tables.items():
        print(f"{name}\n\n{table}\n")


if __name__ == "__main__":
    with one_line():
        main()
