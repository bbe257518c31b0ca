"""
Which part of Diff does what? The seven rows of Table 6 of arXiv 2410.05258.

    python -m experiments.ablations                             # some 80 runs
    python -m experiments.ablations --rates=2e-3 --seed=1,2     # one rate for all rows
    python -m experiments.ablations --publish                   # what is there by now

Each row has its own best rate, chosen on seeds 1 and 2, and is reported on seeds 3 to 7. Other
flags are train.py's: with --preset=gpt2, say which --rates. Then `python -m
experiments.checkpoints residual --ckpt out/ablations/*seed3` says what the norm does to the
residual stream.
"""
import pandas as pd

import bench
import report
import train
from experiments import grid
from model import ATTENTION


def rows_of_table_6(flags):
    """The rows: the paper's name, and train.py's flags."""
    # row 2 of the table: as many heads as Diff has, each twice as large
    half = train.parse([*flags, "--attn=softmax"])[0].n_head // 2
    return {
        "Transformer": ["--attn=softmax"],
        "half the heads of size 2d": ["--attn=softmax", f"--n_head={half}"],
        "half the heads + norm": ["--attn=softmax", f"--n_head={half}", "--subln"],
        "Diff": ["--attn=diff"],
        "Diff without norm": ["--attn=diff", "--no-subln"],
        "Diff λ_init = 0.8": ["--attn=diff", "--lambda_init=0.8"],
        "Diff λ_init = 0.5": ["--attn=diff", "--lambda_init=0.5"],
    }


def table_6(runs):
    """The table, and the statistics behind it."""
    noise = report.Noise(grid.without_diverged(runs))
    table = grid.losses_table(runs, noise)
    heads = []
    sizes = []
    norms = []
    for _, group in runs.groupby("row", sort=False):
        # what the runs say, and not what the row's name or the flags of this command say
        run = group.iloc[0]
        branches = ATTENTION[run["attn"]].branches
        heads.append(int(run["n_head"] // branches))
        sizes.append(int(run["n_embd"] // run["n_head"]))  # n_head counts those of softmax
        norms.append(branches == 2 if pd.isna(run["subln"]) else bool(run["subln"]))
    table.insert(1, "heads", heads)
    table.insert(2, "d", sizes)
    table.insert(3, "norm", norms)
    # the paper compares every row with its first one, the Transformer
    first = "Transformer"
    differences = [None if row == first else noise.difference(row, first) for row in table["row"]]
    table["− Transformer"] = pd.Series(differences, dtype=object)
    return table, noise


def figure_label(row):
    """The row's name beginning with its arm, so that it gets the arm's colour."""
    if row == "Diff":
        return "diff, λ_init as in the paper"
    if row.startswith("Diff"):
        return row.replace("Diff", "diff")
    return f"softmax ({row})"


def finding(noise):
    """The title of the figure: what the norm costs, with two maps and with one."""
    costs = []
    for words, row, base in (
        ("diff", "Diff", "Diff without norm"),
        ("softmax with half the heads", "half the heads + norm", "half the heads of size 2d"),
    ):
        cost = noise.difference(row, base)
        if cost:
            costs.append(f"{report.format_cell(cost)} in {words}")
    return f"What the norm costs: {', '.join(costs) or 'not known yet'}"


def main(argv=None):
    p = grid.parser("python -m experiments.ablations", __doc__, "out/ablations",
                    seeds="3,4,5,6,7", rates="2e-3,4e-3", choose_on="1,2")
    args, flags = p.parse_known_args(argv)
    if "preset" not in grid.flag_names(flags):
        flags = ["--preset=toy", *flags]  # also where train.py's default would be gpt2
    rows = rows_of_table_6(flags)
    result = grid.train_and_collect(rows, args, flags)
    table, noise = table_6(result.runs)
    unit = bench.unit(result.runs)
    figure, (ax,) = report.new_figure(size=(11, 5))
    labels = {row: figure_label(row) for row in table["row"]}
    report.dot_plot(ax, noise.runs.replace({"row": labels}), "loss", row="row")
    ax.set(xlabel=f"val loss, {unit}, left: better (dots: runs; bars: 95 % intervals of the means)")
    report.add_title(figure, finding(noise))
    tables = {f"Table 6: final val loss, {unit}": table, **result.rates}
    about = result.about | noise.sentences()
    report.publish(args.out, "ablations", about, tables, figure, result.every_run)


if __name__ == "__main__":
    grid.command_line("experiments.ablations", main)
