"""
Two rows that the look-up's tables lacked, and a table of lengths.json with equal lambdas.

    python -m lab.missing            # it goes on where it was stopped
    python -m lab.missing publish    # to lab/results/lookup/mixed.json

- One map trained on mixed lengths, never with a minus, read with lambda = 1: at the rate, steps and
  seeds of the grid `mixed` of lab/lookup.py.
- DIFF V2 without an output norm, as it is on text: at the rates and seeds of its rows with a norm.
"""
import argparse
import json
import platform
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from common import cli, commit, device_name, path
from lab import lookup
from lab.lookup import MANY, MIXED, NEW_SEEDS, RATES, SEEDS, TAUS, softmax_task
from lab.sweep import Cache

RESULTS = Path(__file__).parent / "results"
CAPS = (2.0, 1.5, 3.0, 2.5, 3.5, None)  # the most important first
V2_RATES = {2.0: 4.5e-3, None: 3e-3}  # which the rows with a norm had chosen
MORE = ("+256", "+1024", "+4096")
PAIRS = [("difference", "average"), ("difference", "one map"), ("one map", "average")]
FEWER = (64, 256, 1024)  # added pairs in the tests at the other caps than tau = 2


def jobs():
    """(arm, task, rate, seed)"""
    for tau in CAPS[:1]:
        for seed in NEW_SEEDS:
            yield "softmax", softmax_task(tau, train_pairs=MIXED, **MANY), RATES[0], seed
    for tau, lr in V2_RATES.items():
        for seed in SEEDS:
            yield "diff_v2", softmax_task(tau, norm=False), lr, seed
    for tau in CAPS[1:]:
        for seed in NEW_SEEDS:
            yield "softmax", softmax_task(tau, train_pairs=MIXED, **MANY), RATES[0], seed


def train_and_test(arm, task, lr, seed):
    """As lab.lookup.train_and_test, without 16 crowds and without 4,096 more: half of its time."""
    start = time.process_time()
    reader, _ = lookup.train_reader(arm, task, lr, seed)
    row = dict(arm=arm, **asdict(task), lr=lr, seed=seed) | lookup.weights_in_training(reader)
    long_crowds, lookup.LONG_CROWDS = lookup.LONG_CROWDS, FEWER
    row["tests"] = lookup.test_lambdas(reader, "agree")
    lookup.LONG_CROWDS = long_crowds
    return row | dict(seconds=round(time.process_time() - start, 1))


def run(cache, arm, task, lr, seed):
    settings = dict(arm=arm, **asdict(task), lr=lr, seed=seed)

    def make(**_):
        if arm == "softmax" and task.tau == 2.0:
            return lookup.train_and_test(arm, task, lr, seed)[1]
        return train_and_test(arm, task, lr, seed)

    row = cache.run(make, **settings)
    accuracy = {test["lambda_test"]: test["accuracy"] for test in row["tests"][:4]}
    print(arm, task.tau, task.norm, lr, seed, row["lambda"], row["seconds"], flush=True)
    for name in ("learned", 1):
        print(f"  lambda {name}: {accuracy[name]}", flush=True)


def interval(difference_of):
    """[difference of the means, low, high] of two lists of shares in points, by Welch."""
    x, y = (100 * np.array(shares) for shares in difference_of)
    if np.ptp(x) == np.ptp(y) == 0:
        return [round(float(x.mean() - y.mean()), 2)] * 3  # there is no spread
    welch = stats.ttest_ind(x, y, equal_var=False).confidence_interval()
    return [round(float(number), 2) for number in (x.mean() - y.mean(), welch.low, welch.high)]


def mixed_rows(rows):
    """{(arm, cap, lambda, added pairs, extra): right answers by seed} of mixed lengths."""
    found = {}
    for row in rows:
        if row["train_pairs"] != MIXED:
            continue
        tests = row.get("tests") or [row]
        for test in tests:
            for more in set(MORE) & set(test["accuracy"]):
                key = row["arm"], row["tau"], test["lambda_test"], more, test["extra"]
                found.setdefault(key, []).append(test["accuracy"][more])
    return found


def equal_lambdas(found):
    """A row for each cap, length and lambda: means of the seeds in %, and differences in points."""
    lines = []
    arms = {"diff": "difference", "softmax minus average": "average", "softmax": "one map"}
    for extra in ("agree", "crowds"):
        for more in MORE:
            for lam in ("learned", 1):
                for tau in (*TAUS, None):
                    line = dict(more=more, extra=extra, lambda_test=lam, tau=tau)
                    shares = {}
                    for arm, name in arms.items():
                        by_seed = found.get((arm, tau, lam, more, extra), [])
                        complete = len(by_seed) == len(NEW_SEEDS)
                        if complete and not (arm == "softmax" and lam == "learned"):
                            shares[name] = by_seed
                            line[name] = round(100 * float(np.mean(by_seed)), 2)
                            line[f"{name} by seed"] = [round(100 * x, 1) for x in by_seed]
                    for one, other in PAIRS:
                        if one in shares and other in shares:
                            difference = interval((shares[one], shares[other]))
                            line[f"{one} - {other}"] = difference
                    lines.append(line)
    return lines


def compact(row):
    """A run with its tests, without what is long."""
    dropped = ("tests", "curve", "losses", "accuracy_hidden", "accuracy", "machine", "commit")
    kept = {key: value for key, value in row.items() if key not in dropped}
    for name in ("r", "c", "lambda"):
        kept[name] = None if kept[name] is None else round(kept[name], 5)
    tests = []
    for test in row["tests"]:
        accuracy = {name: round(share, 5) for name, share in test["accuracy"].items()}
        said = {name: round(share, 5) for name, share in test["said_crowd"].items()}
        tests.append(dict(lambda_test=test["lambda_test"], extra=test["extra"],
                          accuracy=accuracy, said_crowd=said))
    return kept | dict(tests=tests)


def publish(rows):
    torch.set_num_threads(1)  # as in the runs: the data names it
    published = json.loads((RESULTS / "lengths/lengths.json").read_text(encoding="utf-8"))
    v2_norm = json.loads((RESULTS / "lookup/v2.json").read_text(encoding="utf-8"))["runs"]
    table = equal_lambdas(mixed_rows(published["runs"]) | mixed_rows(rows))
    v2 = []
    for tau in V2_RATES:
        without = [row for row in rows if row["arm"] == "diff_v2" and row["tau"] == tau]
        for lam in ("learned", 1):
            line = dict(tau=tau, lr=V2_RATES[tau], lambda_test=lam)
            line["lambda"] = [round(row["lambda"], 4) for row in without]
            for test in ("0", "8", "16", "48", "+256", "+1024"):
                norm = [row["accuracy"][test] for row in v2_norm
                        if (row["tau"], row["lr"], row["lambda_test"], row["extra"])
                        == (tau, V2_RATES[tau], lam, "agree") and row["seed"] in SEEDS]
                mine = [one["accuracy"][test] for row in without for one in row["tests"]
                        if (one["lambda_test"], one["extra"]) == (lam, "agree")]
                line[test] = dict(without_norm=mine, with_norm=norm)
            v2.append(line)
    content = dict(
        title="One map on mixed lengths, DIFF V2 without a norm, and equal lambdas",
        command="python -m lab.missing",
        commit_of_the_runs="41b4917",
        commit=commit(),
        date=time.strftime("%Y-%m-%d"),
        machine=device_name(torch.device("cpu")),
        torch=torch.__version__,
        python=platform.python_version(),
        of_lengths_json=dict(commit=published["commit"], date=published["date"],
                             machine=published["machine"]),
        intervals="Welch, 95 %, over seeds, in points",
        seeds=dict(mixed=NEW_SEEDS, v2=SEEDS),
        equal_lambdas=table,
        v2=v2,
        runs=[compact(row) for row in rows],
    )
    file = RESULTS / "lookup/mixed.json"
    file.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    for line in table:
        if line["extra"] == "agree" or line["tau"] == 2.0:
            print({key: value for key, value in line.items() if "seed" not in key})
    for line in v2:
        print(line)
    print(f"-> {file}, {file.stat().st_size} bytes")


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m lab.missing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", nargs="?", choices=["run", "publish"], default="run")
    parser.add_argument("--out", type=path, default=Path("out/missing"), help="(out/missing)")
    parser.add_argument("--first", type=int, help="how many runs, the most important first (all)")
    args = parser.parse_args(argv)
    cache = Cache(args.out / "runs.jsonl")
    if args.verb == "publish":
        publish(cache.rows)
    else:
        for arm, task, lr, seed in list(jobs())[: args.first]:
            run(cache, arm, task, lr, seed)


if __name__ == "__main__":
    cli(main)
