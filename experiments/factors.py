"""
What matters: that a head may forget, the norm on its output, or the difference of two maps?

    python -m experiments.factors           # 96 runs of the toy, some three hours of one core; goes on where it stopped
    python -m experiments.factors --seed=1  # seeds are independent: one command for each uses several cores

Every combination of {softmax, linear} x {one map, difference} x {no decay, decay} x {no norm, norm from 0.2, norm from
1 as in the paper}, at the rate 2e-3. Then of each of the eight arms the norm that was best there, at 4e-3.
All runs of a seed share their tokens and the initial bits of what they have in common. So an effect is taken within a
seed: the mean loss with a factor less that without it. Its error is the standard error over the seeds.
"""
import argparse
import itertools
import sys
from pathlib import Path

import torch

import bench
import train

NORMS = ("none", "from 0.2", "from 1")
FACTORS = {  # name: column, without, with
    "linear instead of softmax": ("family", "softmax", "linear"),
    "difference of two maps": ("difference", False, True),
    "decay": ("decay", False, True),
    "norm from 0.2": ("norm", "none", "from 0.2"),
    "norm from 1": ("norm", "none", "from 1"),
}


def command(cell, seed, lr, flags):
    """train.py's flags of a run."""
    family, difference, decay, norm = cell
    attn = {"softmax": ("softmax", "diff"), "linear": ("linear", "diff_linear")}[family][difference]
    own = [f"--attn={attn}", f"--seed={seed}", f"--lr={lr}"]
    if decay:
        own.append("--decay")
    if difference != (norm != "none"):  # else it is what the attention has anyway
        own.append("--no-subln" if norm == "none" else "--subln")
    if norm == "from 0.2":
        own.append("--subln_init=0.2")
    return [*flags, *own]


def train_runs(cells, seeds, lr, flags, out):
    """A row of each run, trained if it is not finished. SystemExit if one was stopped or is not finite."""
    rows = []
    for seed, cell in itertools.product(seeds, cells):
        flags_of_run = command(cell, seed, lr, flags)
        folder = out / train.parse(flags_of_run)[0].out.name
        if not train.main([*flags_of_run, f"--out={folder}"]):
            sys.exit(1)
        loss = train.read_log(folder / "log.jsonl")[1][-1]["val_loss"]
        rows.append(dict(zip(("family", "difference", "decay", "norm"), cell)) | dict(seed=seed, lr=lr, loss=loss))
    return rows


def effect(df, column, without, with_):
    """The effect of a factor, one for each seed."""
    by_seed = df.groupby([column, "seed"])["loss"].mean()
    return by_seed[with_] - by_seed[without]


def effects(df):
    """A row of each factor, and of each two of them: what the first one does with the second less what without it."""
    found = [(name, effect(df, *factor)) for name, factor in FACTORS.items()]
    for (name, factor), (other, (column, without, with_)) in itertools.combinations(FACTORS.items(), 2):
        if factor[0] != column:
            change = effect(df[df[column] == with_], *factor) - effect(df[df[column] == without], *factor)
            found.append((f"{name} x {other}", change))
    return [{"effect of": name, "nats": values.mean(), "error": values.sem()} for name, values in found]


def draw(table):
    """What each factor does to the loss, and below them the interactions that are larger than their error."""
    from matplotlib.figure import Figure

    shown = table[~table["effect of"].str.contains(" x ") | (table["nats"].abs() > table["error"])][::-1]
    figure = Figure(figsize=(8, 0.35 * len(shown) + 1), layout="constrained")
    ax = figure.subplots()
    ax.barh(shown["effect of"], shown["nats"], xerr=shown["error"], capsize=3,
            color=["#CCCCCC" if " x " in name else "#0072B2" for name in shown["effect of"]])  # fmt: skip
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_xlabel("change of val loss, nats per byte (left: better)")
    ax.set_title("grey: interactions", fontsize="medium")
    return figure


def publish(rows, args):
    """Table, effects and figure of these runs."""
    import pandas as pd

    df = pd.DataFrame(rows)
    cells = df.groupby(["family", "difference", "decay", "lr", "norm"], sort=False)["loss"]
    table = cells.agg(lambda values: (values.mean(), values.std())).unstack("norm").reindex(columns=NORMS).reset_index()
    table[["difference", "decay"]] = table[["difference", "decay"]].map({True: "yes", False: "no"}.get)
    change = pd.DataFrame(effects(df[df["lr"] == 2e-3]))
    head = train.read_log(next(args.out.glob("*/log.jsonl")))[0]
    about = bench.conditions(torch.device(head["device"]), data=head["data"], steps=head["steps"], seeds=args.seed)
    caption = "Final val loss, nats per token, by norm, mean ± standard deviation over seeds"
    tables = {caption: table, "What it does to the loss at 2e-3, mean and standard error over seeds": change}
    bench.publish(args.out, "factors", about, tables, draw(change))


def main(argv=None):
    import pandas as pd

    p = argparse.ArgumentParser("factors", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seed", default="1,2,3", help="a comma list (%(default)s)")
    p.add_argument("--out", type=Path, default="out/factors", help="folder of runs and results (%(default)s)")
    args, flags = p.parse_known_args(argv)
    seeds = [int(seed) for seed in args.seed.split(",")]
    arms = list(itertools.product(("softmax", "linear"), (False, True), (False, True)))
    rows = train_runs([(*arm, norm) for arm in arms for norm in NORMS], seeds, 2e-3, flags, args.out)
    publish(rows, args)  # the second part takes another hour

    means = pd.DataFrame(rows).groupby(["family", "difference", "decay", "norm"])["loss"].mean()
    best = [(*arm, means.loc[arm].idxmin()) for arm in arms]
    publish(rows + train_runs(best, seeds, 4e-3, flags, args.out), args)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ImportError) as e:
        sys.exit(f"factors: {e}")
