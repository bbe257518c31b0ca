"""
Which part of Diff does what? The seven rows of Table 6 of arXiv 2410.05258, trained at toy size or any other.

    python -m experiments.ablations                                 # the toy preset, seeds 1, 2 and 3
    python -m experiments.ablations --seed=1 --steps=200 --decay    # --seed, --out, and other flags are train.py's

Stop it whenever you like: the same command goes on. Then `python bench.py residual --ckpt out/ablations/row*-seed1`
says what the norm does to the residual stream.
"""
import argparse
import signal
import sys
from pathlib import Path

import torch

import bench
import train
from model import ATTENTION

# name: attention, does it have half the heads (of twice the size), norm (None: as the attention has it), lambda_init
ROWS = {
    "Transformer": ("softmax", False, None, None),
    "half the heads, d doubled": ("softmax", True, None, None),
    "the same + norm": ("softmax", True, True, None),
    "Diff": ("diff", False, None, None),
    "Diff − norm": ("diff", False, False, None),
    "Diff, λ_init = 0.8": ("diff", False, None, 0.8),
    "Diff, λ_init = 0.5": ("diff", False, None, 0.5),
}


def commands(flags, seeds, out):
    """train.py's flags and the name of each run. ValueError for a flag that would change what a row's name says."""
    found = []
    for seed in seeds:
        for number, (name, (attn, half, subln, lambda_init)) in enumerate(ROWS.items(), 1):
            n_head = train.parse([*flags, "--attn=softmax"])[0].n_head // (2 if half else 1)
            own = [f"--attn={attn}", f"--n_head={n_head}", f"--seed={seed}", f"--out={out / f'row{number}-seed{seed}'}"]
            own += [] if subln is None else ["--subln" if subln else "--no-subln"]
            own += [] if lambda_init is None else [f"--lambda_init={lambda_init}"]
            run, *others = train.parse([*flags, *own])
            wanted = dict(attn=attn, n_head=n_head, subln=subln, lambda_init=lambda_init, subln_init=1.0, seed=seed)
            wrong = [key for key, value in wanted.items() if getattr(run, key) != value]
            if wrong or others:
                raise ValueError(f"Table 6 says itself what {', '.join(wrong) or '--lr'} is in {name!r}: leave it out")
            found.append((name, run, [*flags, *own]))
    return found


def main(argv=None):
    """True if all runs are finished, None if stopped, False if a loss is not finite."""
    p = argparse.ArgumentParser("ablations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seed", default="1,2,3", help="a comma list (%(default)s)")
    p.add_argument("--out", type=Path, default="out/ablations", help="folder of runs and results (%(default)s)")
    args, flags = p.parse_known_args(argv)
    runs_of = commands(flags, [int(seed) for seed in args.seed.split(",")], args.out)
    for _, run, command in runs_of:
        if train.main(command) is None:
            return None

    runs, evals, others = bench.read_runs([run.out for _, run, _ in runs_of])
    names = {str(run.out): name for name, run, _ in runs_of}
    for df in (runs, evals):
        df["arm"] = df["run"].map(names)
    runs["base"] = runs["arm"] == "Transformer"
    table = bench.summarize(runs.sort_values("run"), ["seed"]).rename(columns={"attn": "Model", "− softmax": "− row 1"})
    first = runs.drop_duplicates("arm").set_index("arm").loc[table["Model"]]
    branches = first["attn"].map(lambda attn: ATTENTION[attn].branches)
    table.insert(1, "heads", (first["n_head"] // branches).values)
    table.insert(2, "d", (first["head"].str["n_embd"] // first["n_head"]).values)
    table.insert(3, "norm", first["subln"].fillna(branches == 2).map({True: "yes", False: "no"}).values)
    tables = {"Table 6: final val loss, nats per token, mean ± standard deviation; difference ± standard error": table}
    if len(others):
        tables["Not in these figures"] = others
    head = first["head"].iloc[0]
    how = {name: head[name] for name in ("data", "steps", "decay", "parameters")}
    about = bench.conditions(torch.device(runs_of[0][1].device), **how)
    bench.publish(args.out, "ablations", about, tables, bench.loss_curves(evals))
    return not len(others)


if __name__ == "__main__":
    try:
        signal.signal(signal.SIGINT, train.on_signal)  # finish the step and save
        sys.exit(1 if main() is False else 0)
    except (ValueError, OSError, ImportError) as e:
        sys.exit(f"ablations: {e}")
