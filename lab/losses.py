"""
What runs of train.py ended with, from their logs: the last val loss of each arm over its seeds.

    for s in 1 2 3; do python train.py --attn=softmax,diff --seed=$s --out=out/seeds/$s; done
    python -m lab.losses out/seeds

A row is an arm with its settings, of which those are shown that differ. The last column is its mean
less that of the first row, by Welch's t. A run that diverged has the loss inf, and so has the mean
of its row: the runs that are left may be the better ones.
"""
import json
import math
import os
from dataclasses import fields
from functools import partial
from pathlib import Path

from lab import stats
from model import ATTENTION
from train import MAY_CHANGE, Config

# what all runs must share, or their losses can't be compared
SHARED = ("vocab_size", "train_tokens", "val_tokens", "data_hash", "eval_tokens", "steps",
          "total_batch")
# what makes two runs two rows: the arm, and all other settings but those of how a run was made
TELL_APART = ("attn", *(field.name for field in fields(Config)
                        if field.name not in (*MAY_CHANGE, *SHARED, "attn", "seed")))


def read_run(log):
    """The first line of a log, with the run's {step: val loss} and what it ended with.

    val_loss is inf if the run diverged. ValueError if it is not finished.
    """
    records = [json.loads(line) for line in Path(log).read_text(encoding="utf-8").splitlines()]
    is_log = len(records) > 0 and all(isinstance(record, dict) for record in records)
    if not is_log or "attn" not in records[0]:
        raise ValueError("not a log of train.py")
    run = records[0]
    last = records[-1]
    if "diverged" not in last and last.get("step", 0) < run["steps"]:
        raise ValueError(f"not finished: step {last.get('step', 0)} of {run['steps']}")
    run["curve"] = {r["step"]: r["val_loss"] for r in records if "val_loss" in r}
    run["val_loss"] = last.get("val_loss", math.inf)
    return run


def gather(folder):
    """{settings of a row: its runs} of all logs below folder. Prints what is left out."""
    rows = {}
    below = os.walk(folder, onerror=partial(print, "left out:"), followlinks=True)
    for here, folders, files in below:
        folders.sort()
        if "log.jsonl" not in files:
            continue
        try:
            run = read_run(Path(here) / "log.jsonl")
            runs = rows.setdefault(tuple(run[name] for name in TELL_APART), {})
            same = (run["seed"], *(run.get(name) for name in SHARED))
            if same in runs:
                other = runs[same]["path"]
                raise ValueError(f"the same arm, settings and seed as {other}, which counts")
            runs[same] = run | dict(path=here)
            if run["val_loss"] == math.inf:
                print(f"diverged: {here}")
        except (OSError, ValueError, KeyError) as e:
            print(f"left out: {here}: {e}")
    return {key: list(runs.values()) for key, runs in rows.items() if runs}


def describe(key, keys):
    """{"attn": the arm, and each setting of a row that is not the same in all rows `keys`}"""
    shown = {}
    for name, value, values in zip(TELL_APART, key, zip(*keys)):
        if name == "attn" or len(set(values)) > 1:
            shown[name] = f"{value:g}" if isinstance(value, float) else value
    return shown


def table_of(rows):
    """What is printed, as a list of dicts. rows: {settings of a row: its runs}"""
    table = []
    first = None
    for key, runs in rows.items():
        losses = [run["val_loss"] for run in runs]
        first = first or losses
        less = stats.plus_minus(*stats.difference(losses, first))
        line = describe(key, rows) | {"n": len(runs)}
        line["val loss"] = stats.plus_minus(*stats.mean_interval(losses))
        line["less the first"] = less if table else "–"
        table.append(line)
    return table


def draw(rows, path):
    """Val loss against steps, a line for each run."""
    figure, (ax,) = stats.new_figure(width=9, height=6)
    for number, (key, runs) in enumerate(rows.items()):
        about = describe(key, [other for other in rows if other[0] == key[0]])  # rows of its arm
        label = ", ".join(f"{name} {value}" for name, value in about.items()).removeprefix("attn ")
        color = stats.COLORS.get(key[0], f"C{number}")
        for run in runs:
            # with a marker, because a short run has been evaluated only once
            style = dict(color=color, marker="os^vD"[number % 5], label=label)
            ax.plot(list(run["curve"]), list(run["curve"].values()), **style)
            label = None  # one for all seeds
    ax.set(xlabel="step", ylabel="val loss, nats per token")
    ax.legend()
    figure.savefig(path)


def main(argv=None):
    p = stats.parser("lab.losses", __doc__)
    p.add_argument("folder", type=Path, help="where the runs are, at any depth")
    folder = p.parse_args(argv).folder
    found = gather(folder)
    if not found:
        raise SystemExit(f"no run below {folder} is finished")
    order = {arm: number for number, arm in enumerate(ATTENTION)}  # softmax is first
    keys = sorted(found, key=lambda key: (order.get(key[0], len(order)), key))
    rows = {key: found[key] for key in keys}
    for name in SHARED:
        where = {str(run.get(name)): run["path"] for runs in rows.values() for run in runs}
        if len(where) > 1:
            several = " and ".join(f"{value} in {path}" for value, path in sorted(where.items()))
            raise SystemExit(f"these runs can't be compared: {name} is {several}. Name a folder "
                             "that has only one kind")
    print(f"\n{stats.markdown(table_of(rows))}\n\n± is half of a 95 % interval")
    draw(rows, folder / "losses.png")
    print(f"-> {folder / 'losses.png'}")


if __name__ == "__main__":
    main()
