"""
What experiments share: each row of a table is trained at its own best learning rate.

A row is a name and the flags of train.py that make it. Its rate is chosen on other seeds than those
that are reported, because a loss that was chosen for being small is not a fair one. Nothing is
scheduled: whoever asks for a run that is finished has its loss at once, so an experiment can be
stopped anywhere, and the same command goes on. To use more cores, start it twice with other --rows.
"""
import json
import math
import re
from pathlib import Path

import train
from common import UserError, read_log


class Unfinished(Exception):
    """A run that is not finished, where nothing is to be trained."""


def best_rate(loss, start, seeds, factor=2):
    """The learning rate whose neighbours, a factor away, both have no lower mean loss.

    loss(rate, seed) is the loss of one run, inf if it diverged. Whoever starts again asks for the
    same runs, and makes the same choice.
    """
    means = {}  # {k: the mean loss over the seeds}

    def rate(k):
        return float(f"{start * factor**k:.6g}")  # 0.0045, and not 0.0045000000000000005

    def mean(k):
        if k not in means:
            total = sum(loss(rate(k), seed) for seed in seeds)
            means[k] = total / len(seeds) if math.isfinite(total) else math.inf
        return means[k]

    k = 0
    while abs(k) <= 12:  # so far from the start something else is wrong
        if mean(k) == math.inf:
            k -= 1  # until a run converges
            continue
        best = min((k, k - 1, k + 1), key=mean)  # of equal ones the first, so that it comes to rest
        if best == k:
            return rate(k)
        k = best
    raise UserError(f"no best learning rate near {start:g}: the loss falls on, or all runs diverge")


def run_rows(rows, out, start, choose_on, seeds, publish=False):
    """Trains each row with each seed, at the row's own best rate. A data frame, a line for a run.

    rows: {name: flags of train.py, in one string}. start: the rate that is tried first. choose_on:
    the seeds whose runs choose the rate. seeds: the others, which have True in the column
    `reported`. publish: train nothing, and leave out the rows that are not finished.
    """
    import pandas as pd

    found = []
    for name, flags in rows.items():
        runs = []

        def loss(rate, seed, reported=False):
            run = do_run(name, flags, rate, seed, out, publish)
            runs.append(run | dict(reported=reported))
            return run["loss"]

        try:
            rate = best_rate(loss, start, choose_on)
            for seed in seeds:
                loss(rate, seed, reported=True)
        except Unfinished as e:
            print(f"{name} is left out: {e}", flush=True)
            continue
        found += runs
    if not found:
        raise UserError(f"no row below {out} is finished, so there is nothing to publish")
    return pd.DataFrame(found)


def do_run(name, flags, rate, seed, out, publish):
    """Trains one run, if it is not finished. Returns the head of its log, and its arm and loss."""
    slug = re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-")
    folder = Path(out) / f"{slug}-lr{rate:g}-seed{seed}"
    log = folder / "log.jsonl"
    if not publish:
        print(f"\n{name}, seed {seed}, rate {rate:g}", flush=True)
        train.main([*flags.split(), f"--lr={rate!r}", f"--seed={seed}", f"--out={folder}"])
    elif not log.exists():
        raise Unfinished(f"{folder} is missing")
    head, records = read_log(log)
    last = records[-1] if records else {}
    loss = math.inf if "diverged" in last else last.get("val_loss")
    if loss is None or (loss < math.inf and last["step"] < head["steps"]):
        raise Unfinished(f"{folder} is not finished")
    return head | dict(arm=name, folder=str(folder), loss=loss)


class Cache:
    """The finished runs of a program that does not train with train.py, in a file of JSON lines.

    Two processes may write to it, but neither sees what the other one adds meanwhile.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.rows = []
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        for line in text.split("\n"):
            try:
                self.rows.append(json.loads(line))
            except ValueError:
                continue  # an empty line, or one that was cut when its writer was killed

    def run(self, make, **settings):
        """The row with these settings. If there is none, make(**settings) gives the rest of it."""
        for row in self.rows:
            if all(name in row and row[name] == value for name, value in settings.items()):
                return row
        line = json.dumps(settings | make(**settings))
        self.append(line)
        self.rows.append(json.loads(line))  # as it will be when it is read from the file
        return self.rows[-1]

    def append(self, line):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # unbuffered, so that a line is a single write, which another process can't cut in two. It
        # begins with a new line, as the one before it may have been cut
        with open(self.path, "ab", buffering=0) as f:
            f.write(f"\n{line}\n".encode())
