"""
Looks into trained models: what they attend to, and how large their numbers become.

    python -m lab.maps                                          # the maps of the newest run
    python -m lab.maps --ckpt out/softmax out/diff --text="One, two, one,"
    python -m lab.maps outliers --ckpt out/softmax* out/diff*   # and what scores of few bits cost

A checkpoint is a file or the folder of a run. Checkpoints that differ in their seed alone are
averaged. Tables and figures with numbers are those of Differential Transformer, 2410.05258.
"""
import argparse
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from bench import SETTINGS
from common import UserError, cli, find_checkpoint, path, pick_device, positive
from data import get_tokenizer, load_data
from lab import report
from model import (
    GPT,
    ROW_SUM_EPS,
    LinearAverage,
    Softmax,
    SoftmaxAverage,
    distances,
    log_mask,
    rotate,
    upcast,
)

BITS = [8, 6, 4]
MANUAL = "pydoc_data.topics"  # what a log calls the text that ships with Python


class Checkpoint(NamedTuple):
    model: GPT
    arm: str  # its kind of attention, and the settings in which the checkpoints differ
    seed: int | None
    run: dict  # the head of its run's log, empty for a model that train.py has not made


def open_checkpoints(paths, device):
    """The checkpoints at these paths, or the newest one below out/. UserError if there is none."""
    models = []
    settings = []  # of each model and its run
    for given in paths or [None]:
        file = find_checkpoint(given)
        model = GPT.load(file, device, kernel="sdpa")
        models.append(model)
        settings.append(model.extra.get("run", {}) | asdict(model.config))
        print(f"{file}: {model.config.attn}, seed {settings[-1].get('seed')}", file=sys.stderr)
    if len({str(model.extra.get("tokenizer")) for model in models}) > 1:
        raise UserError("--ckpt: the checkpoints have different tokenizers, compare others")

    differ = []
    for name in SETTINGS:
        if any(one.get(name) != settings[0].get(name) for one in settings):
            differ.append(name)
    found = []
    for model, one in zip(models, settings):
        # None is what is usual for the arm
        parts = [f"{name}={one[name]}" for name in differ if one.get(name) is not None]
        arm = " ".join([model.config.attn, *parts])
        found.append(Checkpoint(model, arm, one.get("seed"), model.extra.get("run", {})))
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
    about = dict(more)
    run = checkpoints[0].run
    if run:
        about["machine"] = run["device_name"]
        about["data"] = run["data"]
        steps = f"{run['steps']} steps of {run['total_batch']:,} tokens"
        about["training"] = f"{steps}, {run['dtype']}"
        about["seeds"] = ", ".join(sorted({str(c.seed) for c in checkpoints}))
        about["commit of the runs"] = ", ".join(sorted({str(c.run["commit"]) for c in checkpoints}))
    return about | {"±": "half of a 95 % interval (Student's t) of the mean over n seeds"}


# -----------------------------------------------------------------------------
# maps


def attention_maps(model, idx):
    """Every layer's maps of the tokens idx (1, T): a list of dicts of (h, T, T), on the CPU.

    One map is {"A"}, a difference is {"A_1", "A_2", "A_1 - λ A_2"}, and one map minus the average
    {"A", "U", "A - λ U"}.
    """
    found = []
    x, rope = model.embed(idx)
    for block in model.blocks:
        layer = block.attn
        q, k, _, lam = layer.project(block.norm1(x))
        log_D = log_mask(layer.decay_rate(q), distances(idx.shape[1], idx.device))
        branches = layer.maps(q, k, rope, log_D)  # (1, H, T, T)
        A = layer.subtract(branches, lam)[0].cpu()
        if lam is None:
            found.append({"A": A})
        else:
            first = branches[0, 0::2].cpu()
            second = branches[0, 1::2].cpu()
            names = ("A_1", "A_2", "A_1 - λ A_2")
            if isinstance(layer, (SoftmaxAverage, LinearAverage)):
                names = ("A", "U", "A - λ U")
            found.append(dict(zip(names, (first, second, A))))
        x = block(x, rope)
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
    enc = get_tokenizer(checkpoints[0].model.extra.get("tokenizer"))
    tokens = enc.encode_ordinary(args.text)
    if not 2 <= len(tokens) <= 256:
        raise UserError(f"--text has {len(tokens)} tokens, and a map of 2 to 256 can be read")
    rows = []
    shown = {}
    for model, arm, seed, _ in checkpoints:
        of_layers = attention_maps(model, torch.tensor([tokens], device=args.device))
        layer = args.layer or len(of_layers)
        if layer > len(of_layers):
            raise UserError(f"--layer={layer}: {arm} has {len(of_layers)} layers")
        for number, of_layer in enumerate(of_layers, 1):
            *_, A = of_layer.values()  # the last one is what the model uses
            rows.append(dict(arm=arm, seed=seed, layer=number) | describe_map(A))
        heads = len(A)
        if args.head is not None and args.head > heads:
            raise UserError(f"--head={args.head}: {arm} has {heads} heads")
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
    """The maps of each arm in a row. Row i of a map is what token i takes."""
    columns = max(len(of_arm) for of_arm in shown.values())
    size = dict(width=4 * columns, height=4 * len(shown) + 0.5)
    figure, axes = report.new_figure(len(shown), columns, **size)
    entries = torch.cat([A[A != 0].abs() for of_arm in shown.values() for A in of_arm.values()])
    largest = entries.quantile(0.99).item()  # the few above it would leave no colour for the rest
    for ax in axes:
        ax.set_visible(False)
    for row, (arm, of_arm) in enumerate(shown.items()):
        for ax, (name, A) in zip(axes[row * columns :], of_arm.items()):
            image = draw_map(ax, A, f"{arm}: {name}", words, largest)
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


# -----------------------------------------------------------------------------
# outliers


def round_scores(scores, bits):
    """Scores (B, H, T, T) in 2^(bits - 1) - 1 steps on either side of 0 (absmax quantisation).

    The last step is the largest absolute score of a text, over all heads of the layer. Scores of
    the future are not counted: nobody looks at them.
    """
    largest = scores.tril().abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-30)
    step = largest / (2 ** (bits - 1) - 1)
    return (scores / step).round() * step


def maps_of(layer, q, k, rope, log_D, change):
    """layer.maps, with change(scores) in the place of the scores, (B, H, T, T).

    Softmax's scores are Q K^T / sqrt(d). Linear attention's are the numerator without its mask.
    """
    if isinstance(layer, Softmax):
        scores = rotate(q, rope) @ rotate(k, rope).mT / math.sqrt(q.shape[-1])
        return F.softmax(upcast(change(scores)) + log_D, dim=-1)
    q = layer.phi(q)
    k = layer.phi(k)
    D = log_D.exp()
    z = (upcast(q @ k.mT) * D).sum(-1, keepdim=True) + ROW_SUM_EPS
    scores = rotate(q, rope) @ rotate(k, rope).mT
    A = upcast(change(scores)) * D / z
    if isinstance(layer, LinearAverage):  # whose second branch has no scores
        U = F.softmax(log_D, dim=-1).expand_as(A)
        A = torch.stack((A, U), dim=2).flatten(1, 2)
    return A


def read(model, tokens, change):
    """(loss, [the residual stream behind each block]) of tokens (B, T + 1), with changed scores."""
    x, rope = model.embed(tokens[:, :-1])
    streams = []
    for block in model.blocks:
        layer = block.attn
        q, k, v, lam = layer.project(block.norm1(x))
        log_D = log_mask(layer.decay_rate(q), distances(x.shape[1], x.device))
        A = layer.subtract(maps_of(layer, q, k, rope, log_D, change), lam)
        x = x + layer.output(A.to(v.dtype) @ v)
        x = x + block.mlp(block.norm2(x))
        streams.append(x)
    loss = F.cross_entropy(model.logits(x).flatten(0, 1), tokens[:, 1:].flatten())
    return loss.item(), streams


class Extremes:
    """The 100 largest absolute values of many tensors, and a sample of them for the median."""

    def __init__(self):
        self.largest = torch.zeros(0)
        self.sample = []

    def add(self, x):
        x = x.abs().flatten().float().cpu()
        # the 100 largest of all are among the 100 largest of each
        tops = x.topk(min(100, len(x))).values
        self.largest = torch.cat((self.largest, tops)).sort(descending=True).values[:100]
        self.sample.append(x[::997])  # a prime: it does not fall into step with the rows of a map

    def row(self):
        places = {f"top {k}": k for k in (1, 2, 3, 10, 100)}
        row = {name: self.largest[k - 1].item() for name, k in places.items()}
        return row | {"median": torch.cat(self.sample).median().item()}


def measure(model, batches):
    """A model's losses on the batches, (B, T + 1) tokens each, and its Extremes.

    The losses are {"exact": ...} and what is added to it with the scores in few bits, {"8 bits":
    ...}. The Extremes are those of the scores and of the residual stream behind each block.
    """
    scores = Extremes()
    stream = Extremes()

    def look(S):
        past = torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).tril()
        seen = S[..., past]
        scores.add(seen[seen != 0])  # one map minus the average has zeros for the average
        return S

    losses = dict.fromkeys(["exact", *(f"{bits} bits" for bits in BITS)], 0.0)
    for tokens in batches:
        exact, streams = read(model, tokens, look)
        losses["exact"] += exact / len(batches)
        for x in streams:
            stream.add(x)
        for bits in BITS:
            rounded, _ = read(model, tokens, lambda S: round_scores(S, bits))
            losses[f"{bits} bits"] += (rounded - exact) / len(batches)
    return losses, {"scores": scores.row(), "residual stream": stream.row()}


def outliers(args, checkpoints):
    """The largest scores and activations (Table 5), and the cost of rounding scores (Figure 8).

    Scores are attention logits in the softmax arms. In the linear ones they are products of
    features before the division by their sum, so compare them within a family only.
    """
    run = checkpoints[0].run
    if not run:
        raise UserError(f"this {checkpoints[0].arm} does not say on which text it was trained")
    _, val, _, about = load_data(None if run["data"] == MANUAL else Path(run["data"]))
    if about["data_sha256"] != run["data_sha256"]:
        raise UserError(f"{run['data']} is not what {checkpoints[0].arm} was trained on any more")
    T = min(checkpoint.model.config.block_size for checkpoint in checkpoints)
    sequences = min(val.sequences(T), args.tokens // T)
    if sequences == 0:
        raise UserError(f"--tokens={args.tokens} is less than one sequence of {T} tokens")
    batches = []
    for i in range(0, sequences, 16):
        several = [val.sequence(j, T) for j in range(i, min(i + 16, sequences))]
        batches.append(torch.from_numpy(np.stack(several)).to(args.device))
    runs = []
    size_rows = []
    for model, arm, seed, run in checkpoints:
        losses, sizes = measure(model, batches)
        runs.append(dict(arm=arm, seed=seed, lr=run.get("lr")) | losses | sizes)
        for of, row in sizes.items():
            size_rows.append(dict(arm=arm, seed=seed, of=of) | row)
    places = ["top 1", "top 2", "top 3", "top 10", "top 100", "median"]
    largest = average(size_rows, places, ["of"]).sort_values("of", kind="stable")
    tables = {
        "The largest absolute values": largest,
        "Val loss, nats per token, and what it gains with rounded scores": average(runs, losses),
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


# -----------------------------------------------------------------------------
# the command line


@torch.no_grad()
def main(argv=None):
    p = argparse.ArgumentParser(
        prog="python -m lab.maps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("measurement", nargs="?", choices=["maps", "outliers"], default="maps")
    p.add_argument("--ckpt", type=path, nargs="+", default=[],
                   help="checkpoints, or the folders of runs (the newest one below out/)")
    p.add_argument("--text", default="def next_line(line): return next(line)",
                   help="maps: what the maps are of (%(default)s)")
    p.add_argument("--layer", type=positive, help="maps: the one in the figure (the last)")
    p.add_argument("--head", type=positive, help="maps: the one in the figure (their mean)")
    p.add_argument("--tokens", type=positive, default=32_768,
                   help="outliers: how much of val to read (%(default)s)")
    p.add_argument("--out", type=path, default=Path("out/maps"),
                   help="folder of the results (%(default)s)")
    p.add_argument("--device", help="cuda, cpu, ... (cuda where there is one, else cpu)")
    args = p.parse_args(argv)
    report.need("pandas")
    args.device = pick_device(args.device)
    checkpoints = open_checkpoints(args.ckpt, args.device)
    if args.measurement == "maps":
        maps(args, checkpoints)
    else:
        outliers(args, checkpoints)


if __name__ == "__main__":
    cli(main)
