"""
Does it hold as the model and the data grow?

    python prepare_fineweb.py --tokenizer=bytes --tokens=3e7 --out=data/fineweb_edu_bytes
    python -m experiments.ladder            # 70 runs or more, up to half an hour each
    python -m experiments.ladder --publish  # what is there by now

Two sizes, 4 blocks of 64 and 128 channels, on 10 bytes of text for each parameter of the blocks.
Each row has its own best rate, chosen on runs of full length with seed 1, and is reported on
seeds 2 and 3. Size, bytes and steps grow together. Other flags are train.py's.
"""
import math

import pandas as pd

import bench
import report
import train
from experiments import grid
from model import GPT, GPTConfig

# per parameter of the blocks. More would be better, but a run should end within half an hour
BYTES = 10
SIZES = [64, 128]  # channels
ARMS = {
    "softmax": ["--attn=softmax"],
    "diff": ["--attn=diff"],
    "softmax 2 heads + decay": ["--attn=softmax", "--n_head=2", "--decay"],
    "diff no norm + decay": ["--attn=diff", "--no-subln", "--decay"],
    "linear 2 heads + decay": ["--attn=linear", "--n_head=2", "--decay"],
    "diff_linear no norm + decay": ["--attn=diff_linear", "--no-subln", "--decay"],
    "diff_linear + decay": ["--attn=diff_linear", "--decay"],
}
COMPARISONS = [
    ("diff", "softmax"),
    ("diff no norm + decay", "softmax 2 heads + decay"),
    ("diff_linear no norm + decay", "linear 2 heads + decay"),
    ("diff_linear + decay", "linear 2 heads + decay"),
    ("linear 2 heads + decay", "softmax 2 heads + decay"),
]


def row_name(n_embd, arm):
    return f"{n_embd} channels: {arm}"


def rows_of_sizes(flags):
    """Every arm at every size, for as many steps as its bytes last."""
    rows = {}
    for n_embd in SIZES:
        size = ["--preset=toy", "--n_layer=4", "--n_head=4", f"--n_embd={n_embd}"]
        config = train.parse([*flags, *size])[0]
        # a model without values, to count its parameters. The arms differ in a few of them, but
        # all of them have to read the same text
        model = GPT(GPTConfig(n_layer=4, n_head=4, n_embd=n_embd), seed=None)
        parameters = sum(p.numel() for p in model.blocks.parameters())
        steps = BYTES * parameters // config.total_batch
        pace = [f"--steps={steps}", f"--eval_every={steps // 10 + 1}"]
        for arm, own in ARMS.items():
            rows[row_name(n_embd, arm)] = [*size, *pace, *own]
    return rows


def differences_table(noise):
    """A row for each comparison, a column for each size, and what changes between the sizes."""
    table = []
    for arm, base in COMPARISONS:
        found = {"of": f"{arm} − {base}"}
        for n_embd in SIZES:
            pair = row_name(n_embd, arm), row_name(n_embd, base)
            found[f"{n_embd} channels"] = noise.difference(*pair)
        small = found[f"{SIZES[0]} channels"]
        large = found[f"{SIZES[1]} channels"]
        if small and large:
            # the sizes have nothing in common but the method, so their errors add up as squares
            error = math.hypot(small.error, large.error)
            found["change"] = report.MeanError(large.mean - small.mean, error)
        table.append(found)
    return pd.DataFrame(table)


def main(argv=None):
    p = grid.parser("python -m experiments.ladder", __doc__, "out/ladder",
                    seeds="2,3", rates="1e-3,2e-3", choose_on="1")
    p.add_argument("--data", default="data/fineweb_edu_bytes",
                   help="shards or a text file (%(default)s)")
    args, flags = p.parse_known_args(argv)
    rows = rows_of_sizes(flags)
    flags.append(f"--data={args.data}")
    result = grid.train_and_collect(rows, args, flags)
    # a larger model's runs differ less, so each size has its own noise
    runs = result.runs.assign(pool=result.runs["n_embd"].map("{} channels".format))
    noise = report.Noise(grid.without_diverged(runs))
    unit = bench.unit(runs)
    table = differences_table(noise)
    figure, (ax,) = report.new_figure(size=(12, 5))
    columns = {f"{SIZES[0]} channels": (False, -0.14), f"{SIZES[1]} channels": (True, 0.14)}
    grid.draw_differences(ax, table, "of", columns)
    ax.set(xlabel=f"difference of the two, {unit}; left: the first is better")
    report.add_title(figure, f"Hollow: {SIZES[0]} channels, filled: {SIZES[1]}")
    tables = {
        f"Final val loss, {unit}": grid.losses_table(runs, noise),
        f"Differences of two arms, {unit}": table,
        **result.rates,
    }
    about = result.about | noise.sentences()
    report.publish(args.out, "ladder", about, tables, figure, result.every_run)


if __name__ == "__main__":
    grid.command_line("experiments.ladder", main)
