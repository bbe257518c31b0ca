"""
What runs of train.py ended with, from their logs: the last val loss of each arm over its seeds.

    python train.py --attn=softmax,diff                             # out/toy
    python train.py --attn=softmax,diff --seed=2 --out=out/seeds/2
    python -m lab.losses                                            # all that lies below out/

A row is an arm with its settings, of which those are shown that differ. The last column is its mean
less that of the first row, by Welch's t. Runs that can't be compared, such as those of another text
or length, stand in tables of their own. A run that diverged is not finished, and so not counted:
then the runs that are left may be the better ones.
"""
import json
import os
from dataclasses import fields
from pathlib import Path

import lab.arms  # noqa: F401, for the order of its arms
from lab import stats
from model import ATTENTION, Refused
from train import MAY_CHANGE, Config

# what runs must share, or their losses can't be compared
SHARED = ("vocab_size", "data_hash", "eval_tokens", "steps", "total_batch")
# what makes two runs two rows: the arm, its own file, and all settings but those of how it was made
TELL_APART = ("attn", "file_hash", *(
    field.name for field in fields(Config)
    if field.name not in (*MAY_CHANGE, *SHARED, "attn", "seed")))


def read_run(log):
    """The first line of a log, with the run's {step: val loss} and what it ended with.

    ValueError if it is not finished.
    """
    records = [json.loads(line) for line in Path(log).read_text(encoding="utf-8").splitlines()]
    is_log = len(records) > 0 and all(isinstance(record, dict) for record in records)
    if not is_log or "attn" not in records[0]:
        raise ValueError("not a log of train.py")
    run, last = records[0], records[-1]
    if last.get("step", 0) < run["steps"]:
        raise ValueError(f"stopped or diverged: step {last.get('step', 0)} of {run['steps']}")
    run["curve"] = {r["step"]: r["val_loss"] for r in records if "val_loss" in r}
    run["val_loss"] = last["val_loss"]
    return run


def gather(folder):
    """{what is shared: {settings of a row: its runs}} of all logs below folder.

    Prints what is left out.
    """
    tables = {}
    for here, folders, files in os.walk(folder, followlinks=True):
        folders.sort()
        if "log.jsonl" not in files:
            continue
        try:
            run = read_run(Path(here, "log.jsonl"))
            table = tables.setdefault(tuple(run.get(name) for name in SHARED), {})
            row = table.setdefault(tuple(run.get(name) for name in TELL_APART), {})
            if run["seed"] in row:
                there = row[run["seed"]]["path"]
                raise ValueError(f"the same arm, settings and seed as {there}, which counts")
            row[run["seed"]] = run | dict(path=here)
        except (OSError, ValueError, KeyError) as e:
            print(f"left out: {here}: {e}")
    return {shared: in_order(table) for shared, table in tables.items()}


def in_order(table):
    """{settings: runs}, in which softmax is first."""
    place = {arm: number for number, arm in enumerate(ATTENTION)}
    rows = {key: list(runs.values()) for key, runs in table.items() if runs}
    keys = sorted(rows, key=lambda key: (place.get(key[0], len(place)), str(key)))
    return {key: rows[key] for key in keys}


def differing(names, keys):
    """Those of the names that have more than one value in the tuples `keys`."""
    return [name for name, *values in zip(names, *keys) if len(set(values)) > 1]


def labels(keys):
    """For each of the keys {"attn": its arm, and each setting that is not the same in all}."""
    shown = {"attn", *differing(TELL_APART, keys)}
    same_arm = [[key for key in keys if key[0] == attn] for attn in {key[0] for key in keys}]
    if not any("file_hash" in differing(TELL_APART, group) for group in same_arm):
        shown.discard("file_hash")  # the arm's name says it already
    found = []
    for key in keys:
        values = {name: value for name, value in zip(TELL_APART, key) if name in shown}
        found.append({name: f"{x:g}" if type(x) is float else x for name, x in values.items()})
    return found


def table_of(rows):
    """What is printed, as a list of dicts. rows: {settings of a row: its runs}"""
    table = []
    first = None
    for line, runs in zip(labels(list(rows)), rows.values()):
        losses = [run["val_loss"] for run in runs]
        first = first or losses
        less = stats.plus_minus(*stats.difference(losses, first)) if table else "–"
        line |= {"n": len(runs), "val loss": stats.plus_minus(*stats.mean_interval(losses))}
        table.append(line | {"less the first": less})
    return table


def draw(rows, path):
    """Val loss against steps, a line for each run."""
    figure, (ax,) = stats.new_figure(width=9, height=6)
    for number, (label, (key, runs)) in enumerate(zip(labels(list(rows)), rows.items())):
        label = ", ".join([label.pop("attn"), *(f"{name} {x}" for name, x in label.items())])
        color = stats.COLORS.get(key[0], f"C{number}")
        for run in runs:
            # with a marker, because a short run has been evaluated only once
            style = dict(color=color, marker="os^vD"[number % 5], label=label)
            ax.plot(list(run["curve"]), list(run["curve"].values()), **style)
            label = None  # one for all seeds
    ax.set(xlabel="step", ylabel="val loss, nats")
    ax.legend()
    figure.savefig(path)
    print(f"-> {path}\n")


def main(argv=None):
    p = stats.parser("lab.losses", __doc__)
    p.add_argument("folder", type=Path, nargs="?", default="out", help="where the runs are (out)")
    folder = p.parse_args(argv).folder
    tables = {shared: rows for shared, rows in gather(folder).items() if rows}
    if not tables:
        raise Refused(f"no run below {folder} is finished")
    several = differing(SHARED, list(tables))
    largest_first = sorted(tables.items(), key=lambda item: -sum(map(len, item[1].values())))
    for number, (shared, rows) in enumerate(largest_first):
        about = [f"{name} {x}" for name, x in zip(SHARED, shared) if name in several]
        print(f"\n{', '.join(about)}".rstrip())
        print(f"{stats.markdown(table_of(rows))}\n\n± is half of a 95 % interval")
        draw(rows, folder / f"losses{number or ''}.png")


if __name__ == "__main__":
    with stats.one_line():
        main()
