"""
What does the authors' second version of differential attention change at toy size?

    python -m experiments.diff_v2           # 30 runs of the toy; goes on where it stopped
    python -m experiments.diff_v2 --seed=1  # --seed and --out; other flags are train.py's
    python -c "import experiments.diff_v2, train; train.main(['--attn=diff_v2'])"   # one run; so for sample.main

V2 is a blog post of January 2026, https://huggingface.co/blog/microsoft/diff-attn-v2, and one layer of code,
https://github.com/microsoft/unilm/tree/master/Diff-Transformer/Diff-Transformer-V2; we know of no paper.
What differs from the first version:
- Keys and values are softmax's, H heads of d channels. Each head gets a second query: q_proj is C x 2C.
- lambda is a sigmoid of a projection of the token: one for each token and head, between 0 and 1. No lambda_init.
- No norm on the heads' output, and no factor 1 - lambda_init.
So a block has C^2 + C H parameters more than softmax's. `diff_v2_narrow` takes them from the MLP. The released layer
leaves its weights to PyTorch; here lambda's are drawn like those of every matrix, so that lambda starts near 1/2.
"""
import argparse
import itertools
import sys
from pathlib import Path

import torch
import torch.nn as nn

import bench
import train
from model import ATTENTION, Softmax, wide


class DiffV2(Softmax):
    """A = A_1 - lambda A_2, and row i of A_n is softmax(q_n,i K^T / sqrt(d) + log D), lambda_i = sigmoid(w . x_i).
    Queries 2j and 2j+1 are the branches of head j, and share its key and its value."""

    def __init__(self, config, depth):
        super().__init__(config, depth)  # the layer of softmax, with h = H
        C = config.n_embd
        self.branches, self.n_head = 2, 2 * self.h
        self.q_proj = nn.Linear(C, 2 * C, bias=False)
        self.lam_proj = nn.Linear(C, self.h, bias=False)  # GPT.draw would take "lambda" in a name for the first version

    def project(self, x):
        """In the place of q a pair: the queries (B, 2H, T, d), and lambda (B, H, T, 1). Each key is copied for its two
        queries, k is (B, 2H, T, d). That is simple, and the cache of keys is twice as large as it has to be."""
        q, k, v = (p(x).unflatten(-1, (-1, self.d)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        lam = wide(self.lam_proj(x)).sigmoid().mT[..., None]
        return (q, lam), k.repeat_interleave(2, 1), v

    def minus(self, form, q, *args):
        q, lam = q
        y = wide(form(q, *args))  # the maps of both branches, or their outputs
        return y[:, 0::2] - lam * y[:, 1::2]

    def A(self, *args): return self.minus(super().A, *args)
    def fast(self, *args): return self.minus(super().fast, *args)
    def row(self, *args): return self.minus(super().row, *args)


class DiffV2Narrow(DiffV2):
    """The same, beside an MLP so much narrower that the block has the parameters of softmax's, within 3C/2."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.narrower = round((config.n_embd + config.n_head) / 3)  # 3C parameters for each


ATTENTION["diff_v2"], ATTENTION["diff_v2_narrow"] = DiffV2, DiffV2Narrow
ROWS = {  # train.py's flags
    "softmax": ["--attn=softmax"],
    "diff": ["--attn=diff"],
    "diff, no norm": ["--attn=diff", "--no-subln"],
    "diff_v2": ["--attn=diff_v2"],
    "diff_v2, narrow MLP": ["--attn=diff_v2_narrow"],
}


def main(argv=None):
    import pandas as pd

    p = argparse.ArgumentParser("diff_v2", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seed", default="1,2,3", help="a comma list (%(default)s)")
    p.add_argument("--out", type=Path, default="out/diff_v2", help="folder of runs and results (%(default)s)")
    args, flags = p.parse_known_args(argv)
    rows, seeds = [], args.seed.split(",")
    for decay, seed, (arm, own) in itertools.product(("no", "yes"), seeds, ROWS.items()):
        command = [*flags, *own, f"--seed={seed}", "--decay" if decay == "yes" else "--no-decay"]
        folder = args.out / train.parse(command)[0].out.name
        if not train.main([*command, f"--out={folder}"]):
            sys.exit(1)
        head, records = train.read_log(folder / "log.jsonl")
        loss = records[-1]["val_loss"]
        rows.append(dict(arm=arm, parameters=head["parameters"], decay=decay, seed=seed, loss=loss))

    df = pd.DataFrame(rows)
    softmax = df.groupby(["decay", "seed"])["loss"].transform("first")  # the first of ROWS
    df["difference"] = (df["loss"] - softmax).mask(df["arm"] == "softmax")
    groups = df.groupby(["arm", "parameters", "decay"], sort=False)
    table = groups["loss"].agg(lambda values: (values.mean(), values.std())).to_frame("val loss")
    table["− softmax"] = groups["difference"].agg(lambda values: (values.mean(), values.sem()))
    caption = ("Final val loss, nats per token, mean ± standard deviation over seeds; difference to softmax with the "
               "same decay and seed, mean ± standard error. Parameters include the embedding")  # fmt: skip
    shown = df.dropna().assign(line="decay: " + df["decay"])
    figure = bench.plot(shown, "arm", "difference", "line", xlabel="", ylabel="val loss − softmax's (nats per token)")
    figure.axes[0].axhline(0, color="black", linewidth=0.8)
    about = dict(data=head["data"], steps=head["steps"], lr=head["lr"], seeds=args.seed)
    about = bench.conditions(torch.device(head["device"]), **about)
    bench.publish(args.out, "diff_v2", about, {caption: table.reset_index()}, figure)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ImportError) as e:
        sys.exit(f"diff_v2: {e}")
