"""
Does it hold as the model and the data grow?

    python prepare_fineweb.py --tokenizer=bytes --tokens=3e7 --val_tokens=1e6 --out=data/fineweb_edu_bytes
    python -m experiments.ladder --dtype=bfloat16 --no-flash --compile  # nine hours of a core; resumable

Three sizes, 4 blocks of 64, 128 and 192 channels, on 10 bytes of real text for each parameter of the blocks, less than
one epoch. The peak rate of a size is the best of three for softmax and diff together, on a fifth of the bytes. The
seven arms share it, and within a seed their tokens and the initial bits of what they have in common. A difference to
softmax (with decay for an arm with decay) is paired by seed. On a GPU leave out --no-flash. More flags: train.py.
"""
import argparse
import sys
from itertools import product
from pathlib import Path

import torch

import bench
import train

SEEDS = {64: (1, 2), 128: (1, 2), 192: (1,)}  # by channels
RATES = (1e-3, 2e-3, 4e-3)
BYTES = 10  # per parameter of the blocks
ARMS = {
    "softmax": ["--attn=softmax"],
    "diff": ["--attn=diff"],
    "softmax, decay": ["--attn=softmax", "--decay"],
    "diff, decay": ["--attn=diff", "--decay"],
    "diff, decay, no norm": ["--attn=diff", "--decay", "--no-subln"],
    "linear, decay": ["--attn=linear", "--decay"],
    "diff_linear, decay, no norm": ["--attn=diff_linear", "--decay", "--no-subln"],
}


def run(arm, n_embd, seed, lr, part, flags, out):
    """A row for each evaluation of a run on this part of the size's bytes. Trains it if it is not finished."""
    blocks = 4 * (4 * n_embd**2 + 3 * n_embd * (8 * n_embd // 3 // 8 * 8))
    steps = int(part * BYTES * blocks / 2048)
    name = f"{n_embd}-{arm.replace(', ', '-').replace(' ', '')}-lr{lr:g}-seed{seed}" + ("-short" if part < 1 else "")
    own = ["--n_layer=4", f"--n_embd={n_embd}", f"--seed={seed}", f"--lr={lr}", f"--steps={steps}"]
    own += [f"--out={out / name}", f"--eval_every={steps // 10 + 1}", f"--save_every={steps // 10 + 1}"]
    if not train.main(["--preset=toy", *flags, *own, *ARMS[arm]]):
        sys.exit(1)
    head, records = train.read_log(out / name / "log.jsonl")
    about = dict(arm=arm, parameters=blocks, seed=seed, lr=lr, decay="decay" in arm, head=head)
    return [about | dict(tokens=r["tokens"], loss=r["val_loss"]) for r in records if r.get("val_loss") and r["step"]]


def against_softmax(df):
    """df with the difference of each row to softmax of the same size, seed, decay and tokens."""
    key = ["parameters", "seed", "decay", "tokens"]
    base = df[df["arm"].isin(["softmax", "softmax, decay"])]
    df = df.merge(base[[*key, "loss"]].rename(columns={"loss": "softmax"}), on=key)
    return df.assign(difference=df["loss"] - df["softmax"])


def draw(df, last):
    """Final loss and difference to softmax by parameters; the difference by tokens, thicker for a larger size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 5), layout="constrained")
    by_size, gap, by_tokens = figure.subplots(1, 3)
    for arm in ARMS:
        marker = "s" if "no norm" in arm else "o" if "decay" in arm else "x"
        style = dict(bench.STYLE[ARMS[arm][0].removeprefix("--attn=")], marker=marker, markersize=4)
        runs = last[last["arm"] == arm].groupby("parameters")
        by_size.plot(runs["loss"].mean(), label=arm, **style)
        if arm in ("softmax", "softmax, decay"):
            continue
        mean, error = runs["difference"].mean(), runs["difference"].sem()
        gap.errorbar(mean.index, mean, error, capsize=3, **style)
        for width, (_, rows) in enumerate(df[df["arm"] == arm].groupby("parameters"), 1):
            over_seeds = rows.groupby("tokens")["difference"]
            mean, error = over_seeds.mean(), over_seeds.sem()
            by_tokens.errorbar(mean.index, mean, error, linewidth=0.7 * width, **style | dict(markersize=2))
    by_size.set(xlabel="parameters of the blocks", ylabel="final val loss (nats per byte)", xscale="log")
    gap.set(xlabel="parameters of the blocks", ylabel="difference to softmax (nats per byte)", xscale="log")
    by_tokens.set(xlabel="bytes seen; thicker: the larger sizes", ylabel="difference to softmax", xscale="log")
    by_tokens.xaxis.set_minor_formatter("")  # its labels would overlap
    for ax in (gap, by_tokens):
        ax.axhline(0, color="black", linewidth=0.8)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    return figure


def main(argv=None):
    import pandas as pd

    p = argparse.ArgumentParser("ladder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--n_embd", default="64,128,192", help="sizes, a comma list of them (%(default)s)")
    p.add_argument("--data", default="data/fineweb_edu_bytes", help="shards or a text file (%(default)s)")
    p.add_argument("--out", type=Path, default="out/ladder", help="folder of runs and results (%(default)s)")
    args, flags = p.parse_known_args(argv)
    flags.append(f"--data={args.data}")
    rows, short = [], []
    for n_embd in map(int, args.n_embd.split(",")):
        tried = [run(arm, n_embd, 1, lr, 0.2, flags, args.out)[-1] for lr, arm in product(RATES, ("softmax", "diff"))]
        short += tried
        lr = pd.DataFrame(tried).groupby("lr")["loss"].mean().idxmin()
        for seed, arm in product(SEEDS[n_embd], ARMS):
            rows += run(arm, n_embd, seed, lr, 1, flags, args.out)
    df = against_softmax(pd.DataFrame(rows))
    last = df[df["tokens"] == df.groupby("parameters")["tokens"].transform("max")]
    groups = last.groupby(["parameters", "tokens", "lr", "arm"], sort=False)
    table = groups["seed"].count().rename("seeds").to_frame()
    table["val loss"] = groups["loss"].agg(lambda values: (values.mean(), values.std()))
    table["− softmax"] = groups["difference"].agg(lambda values: (values.mean(), values.sem()))
    caption = "Final val loss, nats per byte, mean ± standard deviation over seeds; difference ± standard error"
    rates = pd.DataFrame(short).pivot_table("loss", ["parameters", "tokens", "arm"], "lr", sort=False).reset_index()
    short_runs = "Val loss by peak rate, a fifth of the bytes, seed 1"
    tables = {caption: table.reset_index(), short_runs: rates.rename(columns=str)}
    head = df["head"][0]
    about = bench.conditions(torch.device(head["device"]), data=head["data"], flags=" ".join(flags))
    bench.publish(args.out, "ladder", about, tables, draw(df, last))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ImportError) as e:
        sys.exit(f"ladder: {e}")
