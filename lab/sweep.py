"""
What experiments share: each row of a table is trained at its own best learning rate.

A row is a name and the flags of train.py that make it. Its rate is chosen on other seeds than those
that are reported, because a loss that was chosen for being small is not a fair one. Nothing is
scheduled: whoever asks for a run that is finished has its loss at once, so an experiment can be
stopped anywhere, and the same command goes on. To use more cores, start it twice with other --rows.
"""
import json
import math
import os
import re
from pathlib import Path

import train
from common import UserError, read_log

FURTHEST = 12  # so many factors from the first rate we stop looking: something else is wrong


class Unfinished(Exception):
    """A run that is not finished, where nothing is to be trained."""


def best_rate(loss, start, seeds, factor=2):
    """The learning rate whose neighbours, a factor away, both have no lower mean loss.

    loss(rate, seed) is the loss of one run, inf if it diverged. The rates are start * factor^k with
    whole k. So whoever starts again asks for the same runs, and makes the same choice. Raises
    UserError if there is no such rate near `start`.

        best_rate(lambda rate, seed: abs(math.log2(rate / 0.004)), start=0.001, seeds=[1, 2])
        # 0.004: it asks for 0.001, 0.0005, 0.002, 0.004 and 0.008
    """
    means = {}  # {k: the mean loss over the seeds}

    def rate(k):
        return float(f"{start * factor**k:.6g}")  # 0.0045, and not 0.0045000000000000005

    def mean(k):
        if k not in means:
            losses = [loss(rate(k), seed) for seed in seeds]
            total = sum(losses)
            means[k] = total / len(losses) if math.isfinite(total) else math.inf
        return means[k]

    k = 0
    while abs(k) <= FURTHEST:
        if mean(k) == math.inf:
            k -= 1  # until a run converges
            continue
        best = min((k, k - 1, k + 1), key=mean)  # of equal ones the first, so that it comes to rest
        if best == k:
            return rate(k)
        k = best
    raise UserError(
        f"there is no best learning rate between {rate(-FURTHEST):g} and {rate(FURTHEST):g}: the "
        "loss falls up to the end of this range, or every run diverges"
    )


def run_rows(rows, out, start, choose_on, seeds, publish=False):
    """Trains each row with each seed, at the row's own best rate. A data frame, a line for a run.

    rows: {name: flags of train.py, in one string}. start: the rate that is tried first. choose_on:
    the seeds whose runs choose the rate. seeds: those that are reported. publish: train nothing,
    and leave out the rows that are not finished.

    The column `reported` tells the two kinds of runs apart. `loss` is the last val loss, inf if the
    run diverged, and `arm` is the name of the row. The other columns are the head of the run's log.
    """
    import pandas as pd

    assert not set(choose_on) & set(seeds), "a run that chooses a rate must not be reported"
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
    """Trains one run, if it is not finished. Returns its settings and its loss.

    Its arm is the name of the row.
    """
    slug = re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-")
    folder = Path(out) / f"{slug}-lr{rate:g}-seed{seed}"
    log = folder / "log.jsonl"
    if publish:
        if not log.exists():
            raise Unfinished(f"{folder} is missing")
        head, records = read_log(log)
        last = records[-1] if records else {}
        loss = math.inf if "diverged" in last else last.get("val_loss")
        if loss is None or (loss < math.inf and last["step"] < head["steps"]):
            raise Unfinished(f"{folder} is not finished")
    else:
        print(f"\n{name}, seed {seed}, rate {rate:g}", flush=True)
        flags = [*flags.split(), f"--lr={rate!r}", f"--seed={seed}", f"--out={folder}"]
        loss = train.main(flags)[0]
        head, _ = read_log(log)
    return head | dict(arm=name, folder=str(folder), loss=loss)


class Cache:
    """The finished runs of a program that does not train with train.py, in a file of JSON lines.

        cache = Cache("out/lookup/runs.jsonl")
        row = cache.run(train_one, arm="diff", lr=0.002, seed=3)

    The row holds these settings, and what train_one(arm="diff", lr=0.002, seed=3) returned, a dict.
    Where the file has a row with these settings, nothing is run. Two processes may write to one
    file, but neither sees what the other one has added since it began.
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
        """The row of these settings. If there is none, make(**settings) is run and written."""
        for row in self.rows:
            if all(name in row and row[name] == value for name, value in settings.items()):
                return row
        line = json.dumps(settings | make(**settings))
        self.append(line)
        self.rows.append(json.loads(line))  # as it will be when it is read from the file
        return self.rows[-1]

    def append(self, line):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # unbuffered, so that a line is a single write, which another process can't cut in two
        with open(self.path, "ab+", buffering=0) as f:
            if f.tell() > 0:
                f.seek(-1, os.SEEK_END)
                if f.read(1) != b"\n":  # the last line was cut. we begin a new one
                    line = "\n" + line
            f.write(line.encode() + b"\n")
