"""
Looks into trained models: what they attend to, and how large their numbers become.

    python -m experiments.checkpoints maps                          # of the newest run
    python -m experiments.checkpoints maps --ckpt out/softmax out/diff --text="One, two, one,"
    python -m experiments.checkpoints outliers --ckpt out/softmax* out/diff*

A checkpoint is a file or the folder of a run. Checkpoints that differ in their seed alone are
averaged. Tables and figures with numbers are those of Differential Transformer, 2410.05258.
"""
import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import report
import train
from data import get_tokenizer, load_data
from model import GPT, pick_device
from sample import find_checkpoint

BITS = [8, 6, 4]
MANUAL = "pydoc_data.topics"  # what a log calls the text that ships with Python


class Checkpoint(NamedTuple):
    model: GPT
    arm: str  # what its run's log calls it, and its rate if the arm is there at several
    seed: int
    run: dict  # the head of that log


def open_checkpoints(paths, device):
    """The checkpoints at these paths, or the newest one below out/. ValueError if there is none."""
    models = []
    rates = {}  # of each arm
    for path in paths or [None]:
        path = find_checkpoint(path)
        model = GPT.load(path, device, flash=False).eval()
        if "run" not in model.extra:
            raise ValueError(f"{path} does not say how it was trained, as those of train.py do")
        run = model.extra["run"]
        print(f"{path}: {run['arm']}, seed {run['seed']}", file=sys.stderr)
        rates.setdefault(run["arm"], set()).add(run["lr"])
        models.append(model)
    found = []
    for model in models:
        run = model.extra["run"]
        arm = run["arm"]
        if len(rates[arm]) > 1:
            arm += f" lr {run['lr']:g}"
        found.append(Checkpoint(model, arm, run["seed"], run))
    if len({checkpoint.run["tokenizer"] for checkpoint in found}) > 1:
        raise ValueError("--ckpt: the checkpoints have different tokenizers, compare others")
    return found


def average(rows, values, by=()):
    """A row for each arm (and each value of the columns `by`): the means over its n checkpoints."""
    import pandas as pd

    table = []
    for key, group in pd.DataFrame(rows).groupby(["arm", *by], sort=False):
        row = dict(zip(["arm", *by], key)) | {"n": len(group)}
        for value in values:
            found = report.plus_minus(report.means(group, value), "mean")
            row[value] = found["mean"].iloc[0]
        table.append(row)
    return pd.DataFrame(table)


def conditions(checkpoints, **more):
    """What the numbers of a page are quoted with."""
    run = checkpoints[0].run
    return more | {
        "machine": run["device_name"],
        "data": run["data"],
        "training": f"{run['steps']} steps of {run['total_batch']:,} tokens, {run['dtype']}",
        "seeds": ", ".join(map(str, sorted({checkpoint.seed for checkpoint in checkpoints}))),
        "commit of the runs": ", ".join(sorted({str(c.run["commit"]) for c in checkpoints})),
        "±": "half of a 95 % interval (Student's t) of the mean over n seeds",
    }


# maps


def attention_maps(model, idx):
    """Every layer's maps of the tokens idx (1, T): a list of dicts of (h, T, T), on the CPU.

    One map has {"A"}, a difference {"A_1", "A_2", "A_1 - λ A_2"}, --minus_average {"A", "U", ...}.
    """
    names = ("A", "U", "A - λ U") if model.config.minus_average else ("A_1", "A_2", "A_1 - λ A_2")
    found = []

    def look(layer, inputs, y):
        x = inputs[0]
        q, k, _, lam = layer.project(x)
        rope = layer.rope_from_0(x)
        A = layer.attention_map(q, k, lam, rope, rope)[0].cpu()
        if lam is None:
            found.append({"A": A})
            return
        # with lambda 0 it is the first map, and with 1 the first less the second
        first = layer.attention_map(q, k, 0.0, rope, rope)[0].cpu()
        both = layer.attention_map(q, k, 1.0, rope, rope)[0].cpu()
        found.append(dict(zip(names, (first, first - both, A))))

    hooks = [block.attn.register_forward_hook(look) for block in model.blocks]
    model(idx)
    for hook in hooks:
        hook.remove()
    return found


def describe_map(A):
    """A few numbers of a layer's map A (h, T, T). The shares are of absolute values."""
    size = A.abs().sum(-1)
    before = A.diagonal(-1, 1, 2)  # what a token takes from the one before it
    return {
        "sum of a row": A.sum(-1).mean().item(),
        "negative": ((-A).clamp(min=0).sum() / size.sum()).item(),
        "on the first token": (A[..., 0].abs() / size).mean().item(),
        "on the token before": (before.abs() / size[:, 1:]).mean().item(),
    }


def maps(args, checkpoints):
    """What each token of a text takes from the tokens before it (Figure 1)."""
    enc = get_tokenizer(checkpoints[0].run["tokenizer"])
    tokens = enc.encode_ordinary(args.text)
    if not 2 <= len(tokens) <= 256:
        raise ValueError(f"--text has {len(tokens)} tokens, and a map of 2 to 256 can be read")
    rows = []
    shown = {}
    for model, arm, seed, _ in checkpoints:
        of_layers = attention_maps(model, torch.tensor([tokens], device=args.device))
        layer = args.layer or len(of_layers)
        if layer > len(of_layers):
            raise ValueError(f"--layer={layer}: {arm} has {len(of_layers)} layers")
        for number, of_layer in enumerate(of_layers, 1):
            *_, A = of_layer.values()  # the last one is what the model uses
            rows.append(dict(arm=arm, seed=seed, layer=number) | describe_map(A))
        heads = len(A)
        if args.head is not None and args.head > heads:
            raise ValueError(f"--head={args.head}: {arm} has {heads} heads")
        if arm not in shown:  # the first of the seeds
            of_layer = of_layers[layer - 1]
            pick = slice(None) if args.head is None else [args.head - 1]
            shown[arm] = {name: A[pick].mean(0) for name, A in of_layer.items()}
    values = ["sum of a row", "negative", "on the first token", "on the token before"]
    tables = {"The maps by layer, shares of absolute values": average(rows, values, ["layer"])}
    which = "mean of all heads" if args.head is None else f"head {args.head}"
    about = conditions(checkpoints, text=repr(args.text), shown=f"layer {layer}, {which}")
    words = [enc.decode([token]).replace("\n", "↵") for token in tokens]
    figure = draw_maps(shown, words)
    report.publish(args.out, "maps", "What a token attends to", tables, rows, about, figure)


def draw_maps(shown, words):
    """The maps of each arm in a row, and those of arms with one map together. Row i of a map is
    what token i takes."""
    singles = []
    rows = []
    for arm, of_arm in shown.items():
        panels = [(f"{arm}: {name}", A) for name, A in of_arm.items()]
        if len(panels) == 1:
            singles += panels
        else:
            rows.append(panels)
    rows = [singles[i : i + 3] for i in range(0, len(singles), 3)] + rows
    columns = max(len(panels) for panels in rows)
    size = dict(width=4 * columns, height=4 * len(rows) + 0.5)
    figure, axes = report.new_figure(len(rows), columns, **size)
    entries = torch.cat([A[A != 0].abs() for of_arm in shown.values() for A in of_arm.values()])
    largest = entries.quantile(0.99).item()  # the few above it would leave no colour for the rest
    for ax in axes:
        ax.set_visible(False)
    for number, panels in enumerate(rows):
        for ax, (title, A) in zip(axes[number * columns :], panels):
            image = draw_map(ax, A, title, words, largest)
    bar = figure.colorbar(image, ax=list(axes), shrink=0.5, extend="both", pad=0.02)
    bar.ax.tick_params(labelsize=14)
    return figure


def draw_map(ax, A, title, words, largest):
    ax.set_visible(True)
    future = np.triu(np.ones(A.shape, bool), 1)
    A = np.ma.masked_where(future, A.numpy())
    image = ax.imshow(A, cmap="PuOr_r", vmin=-largest, vmax=largest)
    ax.set_title(title, fontsize=16)
    ax.grid(False)
    ax.set(xticks=[], yticks=[])
    if len(words) <= 48:
        labels = [word.replace("$", r"\$") for word in words]  # a $ would begin a formula
        ax.set_xticks(range(len(words)), labels, fontsize=8)
        ax.set_yticks(range(len(words)), labels, fontsize=8)
        ax.tick_params(length=0)
    return image


# outliers


def with_scores(model, change):
    """A copy of the model, in the map form, whose attention uses change(scores) for its scores."""
    copy = GPT(replace(model.config, flash=False), seed=None)
    for depth, block in enumerate(copy.blocks):

        class Changed(type(block.attn)):
            def scores(self, *args):
                return change(super().scores(*args))

        block.attn = Changed(copy.config, depth)
    copy.load_state_dict(model.state_dict())
    return copy.to(model.wte.weight.device).eval()


def round_scores(scores, bits):
    """Scores (B, H, T, T) in 2^(bits - 1) - 1 steps on either side of 0 (absmax quantisation).

    The last step is the largest absolute score of a text, over all heads of the layer. Scores of
    the future are not counted: nobody looks at them.
    """
    largest = scores.tril().abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-30)
    step = largest / (2 ** (bits - 1) - 1)
    return (scores / step).round() * step


class Extremes:
    """The 100 largest absolute values of many tensors, and a sample of them for the median."""

    def __init__(self):
        self.largest = torch.zeros(0)
        self.sample = []

    def add(self, x):
        x = x.detach().abs().flatten().float().cpu()
        # the 100 largest of all are among the 100 largest of each
        tops = x.topk(min(100, len(x))).values
        self.largest = torch.cat((self.largest, tops)).sort(descending=True).values[:100]
        self.sample.append(x[::997])  # a prime: it does not fall into step with the rows of a map

    def row(self):
        places = {f"top {k}": k for k in (1, 2, 3, 10, 100)}
        row = {name: self.largest[k - 1].item() for name, k in places.items()}
        return row | {"median": torch.cat(self.sample).median().item()}


def val_losses(model, batches):
    """The mean loss of the batches, (B, T + 1) tokens each."""
    losses = [model(tokens[:, :-1], tokens[:, 1:])[1].item() for tokens in batches]
    return sum(losses) / len(losses)


def find_outliers(model, batches):
    """The Extremes of the scores and of the residual stream behind each block."""
    scores = Extremes()
    stream = Extremes()

    def look(S):
        past = torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).tril()
        scores.add(S[..., past])
        return S

    copy = with_scores(model, look)
    for block in copy.blocks:
        block.register_forward_hook(lambda block, inputs, y: stream.add(y))
    val_losses(copy, batches)
    return {"scores": scores, "residual stream": stream}


def outliers(args, checkpoints):
    """The largest scores and activations (Table 5), and the cost of rounding scores (Figure 8).

    Scores are attention logits in the softmax arms. In the linear ones they are products of
    features before the division by their sum, so compare them within a family only.
    """
    run = checkpoints[0].run
    _, val, _, about = load_data(None if run["data"] == MANUAL else Path(run["data"]))
    if about["data_sha256"] != run["data_sha256"]:
        raise ValueError(f"{run['data']} is not what {checkpoints[0].arm} was trained on any more")
    T = min(checkpoint.model.config.block_size for checkpoint in checkpoints)
    sequences = min(val.sequences(T), args.tokens // T)
    if sequences == 0:
        raise ValueError(f"--tokens={args.tokens} is less than one sequence of {T} tokens")
    batches = []
    for i in range(0, sequences, 16):
        several = [val.sequence(j, T) for j in range(i, min(i + 16, sequences))]
        batches.append(torch.from_numpy(np.stack(several)).to(args.device))
    runs = []
    size_rows = []
    for model, arm, seed, run in checkpoints:
        row = dict(arm=arm, seed=seed, lr=run["lr"], exact=val_losses(model, batches))
        for bits in BITS:
            rounded = with_scores(model, lambda scores: round_scores(scores, bits))
            row[f"{bits} bits"] = val_losses(rounded, batches) - row["exact"]
        for of, extremes in find_outliers(model, batches).items():
            row[of] = extremes.row()
            size_rows.append(dict(arm=arm, seed=seed, of=of) | row[of])
        runs.append(row)
    places = ["top 1", "top 2", "top 3", "top 10", "top 100", "median"]
    sizes = average(size_rows, places, ["of"]).sort_values("of", kind="stable")
    names = [f"{bits} bits" for bits in BITS]
    tables = {
        "The largest absolute values": sizes,
        "Val loss, nats per token, and what it gains with rounded scores":
            average(runs, ["exact", *names]),
    }
    about = conditions(checkpoints, tokens=f"{sequences * T:,} of val in sequences of {T}")
    figure = draw_outliers(size_rows, runs)
    report.publish(args.out, "outliers", "Outliers and rounding", tables, runs, about, figure)


def draw_outliers(size_rows, runs):
    """The largest residual by arm on the left, the cost of scores of few bits on the right."""
    import pandas as pd

    sizes = pd.DataFrame(size_rows)
    sizes = sizes[sizes["of"] == "residual stream"]
    costs = pd.DataFrame(runs)
    fewest = f"{min(BITS)} bits"
    figure, (left, right) = report.new_figure(columns=2, width=11, height=5, sharey=True)
    report.dots(left, sizes, report.means(sizes, "top 1"), "top 1")
    left.set(xlabel="largest residual", xlim=(0, None))
    report.dots(right, costs, report.means(costs, fewest), fewest)
    right.set(xlabel=f"cost of {fewest}, nats", xlim=(0, None))
    return figure


# the command line


@torch.no_grad()
def main(argv=None):
    p = argparse.ArgumentParser(
        prog="python -m experiments.checkpoints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("measurement", choices=["maps", "outliers"])
    p.add_argument("--ckpt", type=Path, nargs="+", default=[],
                   help="checkpoints, or the folders of runs (the newest one below out/)")
    p.add_argument("--text", default="def next_line(line): return next(line)",
                   help="maps: what the maps are of (%(default)s)")
    p.add_argument("--layer", type=train.positive, help="maps: the one in the figure (the last)")
    p.add_argument("--head", type=train.positive, help="maps: the one in the figure (their mean)")
    p.add_argument("--tokens", type=train.positive, default=32_768,
                   help="outliers: how much of val to read (%(default)s)")
    p.add_argument("--out", type=Path, default=Path("out/checkpoints"),
                   help="folder of the results (%(default)s)")
    p.add_argument("--device", help="cuda, cpu, ... (cuda where there is one, else cpu)")
    args = p.parse_args(argv)
    args.device = pick_device(args.device)
    measure = maps if args.measurement == "maps" else outliers
    measure(args, open_checkpoints(args.ckpt, args.device))


if __name__ == "__main__":
    train.cli(main)
