"""
Trains every row of an experiment with every seed. This is what the experiments share.

An experiment is a table of rows, each a name and its flags for train.py. `run_grid` trains what
is missing and returns a data frame with one row for each run. Where it is given several rates, it
first finds each row's own best rate on some seeds, and then trains other seeds at that rate: a
loss that was chosen because it was small is not the loss that is reported.

A run's folder is <out>/<row>-lr<rate>-seed<seed>. It is an ordinary run of train.py, plus
row.json, which says which row it belongs to. So a grid can be stopped anywhere, and the same
command goes on. Start the same command a second time to use more cores: each process takes the
runs that no other one is training.
"""
import argparse
import fnmatch
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import pandas as pd

import data
import report
import train
from bench import DESCRIPTION, conditions_of_runs, describe_run, without_diverged
from flags import comma_list, int_from_0, positive_number
from model import GPTConfig

MOST_EXTENSIONS = 3  # how often the range of rates grows, if the best one is at its edge
BELONG_TO_THE_GRID = {"attn", "seed", "out", "restart"}
STOP = []  # not empty after Ctrl-C


class Stopped(Exception):
    """Ctrl-C, or a run that was stopped. What it says is for the user."""


def run_grid(rows, seeds, flags, out, rates=None, choose_on=()):
    """Trains each row with each seed. Returns a data frame with one row for each of these runs.

    rows: a dict from a row's name to its flags for train.py, as a list. flags: the flags that all
    runs share. rates: peak rates. Each row is trained with all of them on the seeds in choose_on,
    and with its own best one on `seeds`. Without rates every run has the rate that the flags or
    the preset say. Raises ValueError before anything is trained for a flag that a row sets
    itself, and Stopped after Ctrl-C.
    """
    refuse_flags_of_rows(rows, flags, rates)
    refuse_shared_seeds(seeds, rates, choose_on)
    while True:
        # look again before each run: another process may have finished some of them
        runs = read_runs(out)
        refuse_other_settings(rows, flags, runs, rates)
        missing = missing_runs(rows, seeds, runs, rates, choose_on)
        if not missing:
            return reported(rows, seeds, runs, rates, choose_on)
        trained = False
        for row, seed, rate in missing:
            trained = train_if_free(rows[row], row, seed, rate, flags, out)
            if trained:
                break
        if not trained:  # other processes are training all of them
            time.sleep(2)


def flag_names(flags):
    """The names of the flags in a command. --no-decay and --decay are one setting: decay."""
    given = [flag[2:].split("=")[0] for flag in flags if flag.startswith("--")]
    return [name.removeprefix("no-") for name in given]


def refuse_flags_of_rows(rows, flags, rates=None):
    """ValueError for a flag that would change what a row's name says. It names the flag.

    If --decay were given to all rows, the row "softmax" would be softmax with decay. So a flag that
    one of the rows sets can't be given to all of them.
    """
    ours = set(BELONG_TO_THE_GRID)
    for own in rows.values():
        ours.update(flag_names(own))
    if rates:
        ours.add("lr")  # --rates says it
    if "steps" in ours:
        ours.add("tokens")  # which would set the same thing
    for name in flag_names(flags):
        if name in ours:
            raise ValueError(f"--{name} belongs to the experiment itself: leave it out")
    for own in rows.values():  # any other flag that is wrong is found here as well
        if len(train.parse([*flags, *own])) > 1:
            raise ValueError("the rows of an experiment share one rate: give --lr a single value")


def refuse_shared_seeds(seeds, rates, choose_on):
    """ValueError if a loss that chooses a rate would also be reported."""
    shared = set(seeds) & set(choose_on)
    if shared and rates and len(rates) > 1:
        which = ", ".join(map(str, sorted(shared)))
        raise ValueError(f"--seed and --choose_on share {which}. A loss that was chosen for being "
                         "small is not reported: give --choose_on other seeds")


def refuse_other_settings(rows, flags, runs, rates=None):
    """ValueError, naming the difference, if a run there has other settings than now."""
    # only the data say the first three, and they are not open yet
    free = {"vocab_size", "tokenizer", "data_sha256", "seed"}
    if rates:
        free.add("lr")  # the rates tried earlier count as tried
    configs = {row: train.parse([*flags, *own])[0] for row, own in rows.items()}
    for run in runs[runs["row"].isin(configs)].itertuples():
        differences = []
        for name in train.IDENTITY:
            if name in free:
                continue
            now = getattr(configs[run.row], name)
            there = run.head.get(name)
            if there != now:
                differences.append(f"{name} is {there!r} there and {now!r} here")
        if differences:
            what = ", ".join(differences)
            raise ValueError(f"{run.folder} has other settings: {what}. Choose another --out")
    if runs["data_sha256"].nunique() > 1:
        names = ", ".join(runs["data"].unique())
        raise ValueError(f"the runs in one --out were trained on different data: {names}")


def missing_runs(rows, seeds, runs, rates=None, choose_on=()):
    """The runs that can be trained now, as (row, seed, rate), the most urgent first."""
    if rates is None:
        # nothing has to be known before any of the runs
        done = set(zip(runs["row"], runs["seed"]))
        wanted = itertools.product(seeds, rows)
        return [(row, seed, None) for seed, row in wanted if (row, seed) not in done]
    choosing = []
    reporting = []
    for row in rows:
        mine = runs[runs["row"] == row]
        done = set(zip(mine["seed"], mine["lr"]))
        rate, more = choose_rate(mine, rates, choose_on)
        for choosing_seed, new_rate in itertools.product(choose_on, more):
            if (choosing_seed, new_rate) not in done:
                choosing.append((row, choosing_seed, new_rate))
        if not more:
            reporting += [(row, seed, rate) for seed in seeds if (seed, rate) not in done]
    # one seed after the other, so that a grid that was stopped has something of each row
    choosing.sort(key=lambda job: choose_on.index(job[1]))
    reporting.sort(key=lambda job: seeds.index(job[1]))
    return choosing + reporting


def choose_rate(runs, rates, choose_on):
    """The best rate of one row, None if unknown, and the rates that have to be tried first.

    A rate is as good as its mean loss on the seeds in choose_on. A run that diverged is worse
    than any other. If the best rate is the smallest or the largest one tried, the next one beyond
    it is tried too. A single rate is not chosen but used.
    """
    if len(rates) == 1:
        return rates[0], []
    choosing = runs[runs["seed"].isin(choose_on)]
    tried = sorted({*rates, *choosing["lr"]})
    means = {}
    for rate in tried:
        losses = choosing[choosing["lr"] == rate]
        if set(losses["seed"]) != set(choose_on):
            return None, tried
        means[rate] = losses["loss"].fillna(math.inf).mean()
    best = min(tried, key=means.get)
    if len(tried) < len(rates) + MOST_EXTENSIONS:
        if best == tried[0]:
            return None, [significant(tried[0] ** 2 / tried[1])]
        if best == tried[-1]:
            return None, [significant(tried[-1] ** 2 / tried[-2])]
    return best, []


def significant(rate):
    """A rate with the digits that a person would write: 0.008 and not 0.008000000000000002."""
    return float(f"{rate:.3g}")


def reported(rows, seeds, runs, rates=None, choose_on=()):
    """The runs that are reported: of each row those of `seeds` at its own best rate.

    The column at_edge says where the best rate is the smallest or the largest one that was tried.
    A row whose best rate is not known yet is left out.
    """
    found = []
    for row in rows:
        of_row = runs[runs["row"] == row]
        mine = of_row[of_row["seed"].isin(seeds)].sort_values("seed")
        at_edge = False
        if rates:
            best, _ = choose_rate(of_row, rates, choose_on)
            mine = mine[mine["lr"] == best]  # no run's rate is None
            tried = of_row["lr"][of_row["seed"].isin(choose_on)]
            at_edge = len(rates) > 1 and best in (tried.min(), tried.max())
        if len(mine):
            found.append(mine.assign(at_edge=at_edge))
    return pd.concat(found, ignore_index=True) if found else runs[:0]


def train_if_free(own, row, seed, rate, flags, out):
    """Trains one run, from where it stopped. False if another process is training it."""
    if STOP:  # before the lock, since we may be waiting for another process
        raise Stopped(goes_on(out))
    short = re.sub(r"[^A-Za-z0-9_.]+", "-", row).strip("-")
    parts = [short, *([train.run_name_part("lr", rate)] if rate else []), f"seed{seed}"]
    folder = out / "-".join(parts)
    folder.mkdir(parents=True, exist_ok=True)
    # what is given last counts, but no flag is given twice: see refuse_flags_of_rows
    command = [*flags, *own, f"--seed={seed}", f"--out={folder}"]
    if rate:
        command.append(f"--lr={rate!r}")  # exact to the last digit
    with open(folder / "row.json", "a+") as file:  # "w" would empty it for another process
        try:
            data.lock(file, folder)
        except ValueError:
            return False
        file.truncate(0)
        json.dump(dict(row=row, flags=own), file)
        file.flush()
        print(f"\n{row}, seed {seed}" + (f", rate {rate:g}" if rate else ""), flush=True)
        if train.main(command) == "stopped":
            raise Stopped(goes_on(out))
    return True


def goes_on(out):
    done = len(read_runs(out))
    return f"stopped. {done} runs are finished, nothing is lost, and the same command resumes"


def read_runs(out):
    """A data frame with a row for each run of a grid below out that has come to its end.

    A run whose loss was not finite is at its end as well: its loss is NaN here.
    """
    rows = []
    for file in sorted(Path(out).glob("*/row.json")):
        folder = file.parent
        try:
            row = json.loads(file.read_text())["row"]
            head, records = train.read_log(folder / "log.jsonl")
        except (ValueError, OSError):
            continue  # it has only just begun
        head = asdict(GPTConfig()) | head  # an old log lacks the fields that came later
        run = describe_run(head, records)
        if not run["status"].startswith("stopped"):
            rows.append(dict(row=row, folder=str(folder), head=head) | run)
    return pd.DataFrame(rows, columns=["row", *DESCRIPTION, "folder", "head"])


class Result(NamedTuple):
    """What an experiment publishes."""

    runs: object  # a data frame: the runs that are reported
    every_run: object  # a data frame: also those that chose the rates
    about: dict  # the conditions
    rates: dict  # caption and table of the loss by rate, if several were tried


def train_and_collect(rows, args, flags):
    """Trains what is missing of the rows, unless --publish asks for what is there. The Result."""
    report.check_can_publish(args.out)
    refuse_flags_of_rows(rows, flags, args.rates)
    if not args.publish:
        # all rows are looked at: all that are there are published, not only those picked now
        refuse_other_settings(rows, flags, read_runs(args.out), args.rates)
        picked = pick(rows, args.rows)
        run_grid(picked, args.seed, flags, args.out, args.rates, args.choose_on)
    return collect(rows, args)


def collect(rows, args):
    """The Result of the runs below args.out. ValueError if no row is far enough to be reported."""
    every_run = read_runs(args.out)
    every_run = every_run[every_run["row"].isin(list(rows))].drop(columns="head")
    runs = reported(rows, args.seed, every_run, args.rates, args.choose_on)
    if runs.empty:
        raise ValueError(f"no row below {args.out} is far enough to be published")
    about = conditions_of_runs(runs)
    about["seeds"] = ", ".join(map(str, sorted(runs["seed"].unique())))
    about["±"] = "half of the 95 % interval"
    rates = {}
    if len(args.rates) > 1:
        choosing_seeds = ", ".join(map(str, args.choose_on))
        table = rates_table(every_run, rows, args.choose_on)
        rates[f"Val loss by rate, mean over the seeds {choosing_seeds} that chose it"] = table
    return Result(runs, every_run, about, rates)


def losses_table(runs, noise):
    """A row for each row of the grid: its rate, and its loss over the seeds.

    runs: all of them. noise: that of without_diverged(runs), so a row with a run that diverged has
    no loss here.
    """
    table = []
    for row, group in runs.groupby("row", sort=False):
        first = group.iloc[0]
        edge = ", at the edge of those tried" if first["at_edge"] else ""
        found = {"row": row, "parameters": int(first["parameters"])}
        found["rate"] = f"{first['lr']:g}{edge}"
        found["seeds"] = len(group)
        found["diverged"] = int(group["loss"].isna().sum())
        found["val loss"] = noise.mean(row)
        table.append(found)
    return pd.DataFrame(table)


def rates_table(runs, rows, choose_on):
    """The mean loss of each row at each rate that was tried, on the seeds that chose.

    As in choose_rate, a rate at which one of the runs diverged has no mean. A rate that was not
    yet trained with all of these seeds has none either.
    """
    choosing = runs[runs["seed"].isin(choose_on)].fillna({"loss": math.inf})
    table = choosing.pivot_table("loss", "row", "lr")
    counts = choosing.pivot_table("loss", "row", "lr", "count")
    table = table[counts == len(choose_on)].replace(math.inf, "diverged")
    table = table.reindex([row for row in rows if row in table.index])
    return table.rename(columns="{:g}".format).reset_index()


def draw_differences(ax, table, label, columns, limit=0.1):
    """A row for each comparison, and for each of its columns a dot with its 95 % interval.

    columns: for each one whether its dots are filled, and how far below the middle they stand.
    limit: a larger difference is written at the side, so that the small ones can be seen.
    """
    for column, (filled, below) in columns.items():
        for number, found in enumerate(table[column]):
            height = number + below  # downwards, the axis is turned over
            if not isinstance(found, report.MeanError):
                continue
            if abs(found.mean) > limit:
                dot = "●" if filled else "○"
                if found.mean > 0:
                    side = {"s": f"{dot} {found.mean:+.2f} →", "x": 1, "ha": "right"}
                else:
                    side = {"s": f"← {found.mean:+.2f} {dot}", "x": 0, "ha": "left"}
                ax.text(y=height, va="center", fontsize=11,
                        transform=ax.get_yaxis_transform(), **side)
                continue
            color = "black" if filled else "white"
            ax.errorbar(found.mean, height, xerr=found.error, marker="o", markersize=7, capsize=4,
                        color="black", markerfacecolor=color)
    ax.set_yticks(range(len(table)), table[label])
    ax.set_ylim(len(table) - 0.4, -0.8)
    ax.set_xlim(-limit, limit)
    ax.locator_params(axis="x", nbins=5)
    ax.axvline(0, color="black", linewidth=0.8)
    ax.grid(axis="y", visible=False)


def parser(name, about, out, seeds, rates, choose_on):
    """The flags that all experiments have. What it does not know belongs to train.py.

    seeds, rates and choose_on are the defaults, written as on the command line.
    """
    p = argparse.ArgumentParser(
        prog=name,
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a flag of train.py may be the beginning of one of these
    )
    seed_list = comma_list(int_from_0)
    p.add_argument("--seed", type=seed_list, default=seeds,
                   help="the seeds that are reported, a comma list (%(default)s)")
    p.add_argument("--choose_on", type=seed_list, default=choose_on,
                   help="the seeds on which each row's rate is chosen (%(default)s)")
    p.add_argument("--rates", type=comma_list(positive_number), default=rates,
                   help="the peak rates that each row tries, and more if the best is at an edge. "
                        "A single one is used as it is (%(default)s)")
    p.add_argument("--rows", default="*", help="the rows to train, a comma list of patterns (all)")
    p.add_argument("--out", type=Path, default=Path(out),
                   help="folder of the runs and results (%(default)s)")
    p.add_argument("--publish", action="store_true", help="train nothing, publish what is there")
    return p


def pick(rows, patterns):
    """The rows whose name fits one of the patterns. ValueError for a pattern that fits none."""
    picked = []
    for pattern in patterns.split(","):
        fitting = fnmatch.filter(rows, pattern.strip())
        if not fitting:
            raise ValueError(f"--rows={pattern} is not a row. There are: {', '.join(rows)}")
        picked += fitting
    return {name: rows[name] for name in rows if name in picked}


def finished_lines(file):
    """The JSON lines of a file, one for each finished run. A line that was cut is removed."""
    text = file.read_text() if file.exists() else ""
    *lines, cut = text.split("\n")
    if cut:  # we were killed while we wrote it
        file.write_text(text.removesuffix(cut))
    return [json.loads(line) for line in lines]


def in_processes(do, jobs, procs):
    """Yields do(job) for each of the jobs, in their order. `procs` of them run at once.

    However this process ends, by Ctrl-C, by an error or by kill -9, the others end with it."""
    if procs == 1 or len(jobs) <= 1:
        yield from map(do, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(procs, context, initializer=end_with_parent) as pool:
        try:
            for future in [pool.submit(do, job) for job in jobs]:
                yield future.result()
        finally:
            # without this, Ctrl-C would wait until the jobs that have begun are done
            for process in multiprocessing.active_children():
                process.terminate()


def end_with_parent():
    """In a new process: it ends when the one that started it does, and not by itself at Ctrl-C."""

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=wait, daemon=True).start()


def stop(number, frame):
    """The signal handler: the run finishes its step and saves, and no other one begins."""
    STOP.append(number)
    train.request_stop(number, frame)


def command_line(name, main):
    """Runs an experiment's main as a program: errors and Ctrl-C end it in one sentence."""
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    try:
        main()
    except (Stopped, ValueError, OSError, ImportError) as e:
        sys.exit(f"{name}: {e}")
