"""
Looks into trained models: what they attend to, and how large their numbers become.

    python -m lab.maps                                          # the maps of the newest run
    python -m lab.maps --ckpt out/softmax out/diff --text="One, two, one,"
    python -m lab.maps --ckpt=out/smollm2 --head=18.6 --minus=0.5   # one head, and with a minus
    python -m lab.maps outliers --ckpt out/softmax* out/diff*   # and what scores of few bits cost

A checkpoint is a file or the folder of a run. Those that differ in their seed alone are averaged.
Tables and figures with numbers are those of Differential Transformer, arXiv 2410.05258.
"""
import argparse
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import train
from common import UserError, cli, find_checkpoint, number, path, pick_device, positive
from data import get_tokenizer, load_data
from lab import report
from model import GPT, ROW_SUM_EPS, Average, LinearAverage, Softmax
from model import distances, log_mask, rotate, upcast

TOKENS = 32_768  # of val, for the outliers


def open_checkpoints(paths, device):
    """[(model, arm, the head of its log)] of these paths, or of the newest checkpoint below out/.

    The arm is the attention and the settings in which the checkpoints differ. The head is empty if
    train.py has not made the model.
    """
    models = []
    settings = []
    for given in paths or [None]:
        file = find_checkpoint(given)
        model = GPT.load(file, device, kernel="sdpa")
        models.append(model)
        settings.append(model.extra.get("run", {}) | asdict(model.config))
        print(f"{file}: {model.config.attn}, seed {settings[-1].get('seed')}", file=sys.stderr)
    if len({str(model.extra.get("tokenizer")) for model in models}) > 1:
        raise UserError("--ckpt: the checkpoints have different tokenizers, compare others")

    found = []
    names = [name for name in train.IDENTITY if name not in ("attn", "seed")]
    differ = [name for name in names if len({str(one.get(name)) for one in settings}) > 1]
    for model, one in zip(models, settings):
        # None is what is usual for the arm
        parts = [f"{name}={one[name]}" for name in differ if one.get(name) is not None]
        found.append((model, " ".join([one["attn"], *parts]), model.extra.get("run", {})))
    return found


def look(model, idx, maps_of):
    """Reads the tokens idx (B, T) by maps, which maps_of(layer, q, k, rope, log_D) makes.

    Yields of each block: the layer, the maps of its branches (B, H, T, T), the map A that is left
    of them (B, h, T, T), and the residual stream behind the block.
    """
    x, rope = model.embed(idx)
    for block in model.blocks:
        layer = block.attn
        q, k, v, lam = layer.project(block.norm1(x))
        log_D = log_mask(layer.decay_rate(q), distances(idx.shape[1], idx.device))
        branches = maps_of(layer, q, k, rope, log_D)
        A = layer.subtract(branches, lam)
        x = x + layer.output(A.to(v.dtype) @ v)
        x = x + block.mlp(block.norm2(x))
        yield layer, branches, A, x


def attention_maps(model, idx):
    """Every layer's maps of the tokens idx (1, T): a list of dicts of (h, T, T), on the CPU.

    One map is {"A"}, a difference is {"A_1", "A_2", "A_1 - λ A_2"}, and one map minus the average
    {"A", "U", "A - λ U"}.
    """
    found = []
    for layer, branches, A, _ in look(model, idx, lambda layer, *qk: layer.maps(*qk)):
        shown = [branches[0, 0::2], branches[0, 1::2], A[0]]
        names = ["A_1", "A_2", "A_1 - λ A_2"]
        if branches.shape == A.shape:  # nothing is subtracted
            shown = [A[0]]
            names = ["A"]
        elif isinstance(layer, Average):
            names = ["A", "U", "A - λ U"]
        found.append({name: maps.cpu() for name, maps in zip(names, shown)})
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
    import pandas as pd

    enc = get_tokenizer(checkpoints[0][0].extra.get("tokenizer"))
    tokens = enc.encode_ordinary(args.text)
    if not 2 <= len(tokens) <= 256:
        raise UserError(f"--text has {len(tokens)} tokens, and a map of 2 to 256 can be read")
    what = "layer" if args.head is None else "map"
    rows = []
    shown = {}
    for model, arm, run in checkpoints:
        of_layers = attention_maps(model, torch.tensor([tokens], device=args.device))
        name, chosen = choose_maps(args, arm, of_layers)
        shown.setdefault(name, chosen)  # of several seeds the first one
        if args.head is None:
            # the last map of a layer is what the model uses
            described = {i: list(maps.values())[-1] for i, maps in enumerate(of_layers, 1)}
        else:
            described = {name: A[None] for name, A in chosen.items()}
        for key, A in described.items():
            rows.append({"arm": arm, "seed": run.get("seed"), what: key} | describe_map(A))
    runs = pd.DataFrame(rows)
    table = report.average(runs, ["arm", what], list(runs.columns[3:]))
    tables = {f"The maps by {what}, shares of absolute values": table}
    layer = args.layer or len(of_layers)
    about = dict(text=repr(args.text), shown=f"layer {layer}, mean of all heads")
    if args.head is not None:
        about["shown"] = "layer {}, head {}, both counted from 0".format(*args.head)
    if all(run for _, _, run in checkpoints):
        about |= report.conditions_of([run for _, _, run in checkpoints])
    figure = draw_maps(shown, [enc.decode([token]) for token in tokens])
    report.publish(args.out, "maps", "What a token attends to", tables, rows, about, figure)


def choose_maps(args, arm, of_layers):
    """What the figure shows of a model: its name, and maps (T, T), of a head or the mean of all.

    With --minus the last one is A - minus U, where U takes the mean of the tokens so far. It leaves
    out the first one, to which many heads give what they have no use for.
    """
    number = args.layer or len(of_layers)
    if number > len(of_layers):
        raise UserError(f"--layer={number}: {arm} has {len(of_layers)} layers")
    chosen = {name: A.mean(0) for name, A in of_layers[number - 1].items()}
    if args.head is not None:
        layer, head = args.head
        heads = len(next(iter(of_layers[0].values())))
        if layer >= len(of_layers) or head >= heads:
            has = f"{len(of_layers)} layers of {heads} heads"
            raise UserError(f"--head={layer}.{head}: {arm} has {has}, both counted from 0")
        arm = f"{arm} {layer}.{head}"
        chosen = {name: A[head] for name, A in of_layers[layer].items()}
    if args.minus is not None:
        *_, A = chosen.values()
        U = torch.ones_like(A).tril()
        U[:, 0] = 0
        U /= U.sum(-1, keepdim=True).clamp(min=1)
        chosen[f"A - {args.minus:g} U"] = A - args.minus * U
    return arm, chosen


def draw_maps(shown, tokens):
    """The maps of each arm in a row. Row i of a map is what token i takes."""
    columns = max(len(of_arm) for of_arm in shown.values())
    size = dict(width=4 * columns, height=3.8 * len(shown) + 0.6)
    figure, axes = report.new_figure(len(shown), columns, **size)
    letters = 6.5 * columns  # in points: 9 pixels where the figure is 415 pixels wide
    entries = [A[:, 1:].abs() for of_arm in shown.values() for A in of_arm.values()]
    entries = torch.cat([A[A > 0] for A in entries])
    # the few above it would leave no colour for the rest, and the first token is often among them
    largest = entries.quantile(0.97).item()
    future = np.triu(np.ones((len(tokens), len(tokens)), bool), 1)
    for row, (arm, of_arm) in enumerate(shown.items()):
        for ax, (name, A) in zip(axes[row * columns :], of_arm.items()):
            A = np.ma.masked_where(future, A.numpy())
            image = ax.imshow(A, cmap="PuOr_r", vmin=-largest, vmax=largest)
            title = f"${name}$" if len(shown) == 1 else f"{arm}: ${name}$"
            ax.set_title(title, fontsize=letters)
            ax.grid(False)
            ax.set(xticks=[], yticks=[])
            if len(tokens) <= 48:
                label_tokens(ax, tokens, letters)
    for i, ax in enumerate(axes):
        ax.set_visible(bool(ax.images))
        if i % columns > 0:
            ax.set_yticklabels([])
    figure.supylabel("token i takes", fontsize=letters)
    figure.supxlabel("from token j", fontsize=letters)
    bar = figure.colorbar(image, ax=list(axes), shrink=0.6, extend="both", pad=0.02)
    bar.set_label("weight", fontsize=letters)
    bar.ax.tick_params(labelsize=letters)
    return figure


def label_tokens(ax, tokens, size):
    """Names the tokens on both axes, or the words where a token is a letter: it would be small."""
    pitch = 200 / len(tokens)  # from token to token, about, in points
    if max(map(len, tokens)) == 1:
        words = list(re.finditer(r"\S+", "".join(tokens)))
        places = [(word.start() + word.end() - 1) / 2 for word in words]
        names = [word.group() for word in words]
        size = min(size, 1.6 * pitch)  # a letter is narrower than it is high
        rotation = 0
    else:
        places = range(len(tokens))
        names = [token.replace("\n", "↵") for token in tokens]
        size = min(size, pitch)
        rotation = 90
    names = [name.replace("$", r"\$") for name in names]  # a $ would begin a formula
    ax.set_xticks(places, names, fontsize=size, rotation=rotation)
    ax.set_yticks(places, names, fontsize=size)
    ax.tick_params(length=0)


def round_scores(scores, bits):
    """Scores (B, H, T, T) in 2^(bits - 1) - 1 steps on either side of 0 (absmax quantisation).

    The last step is the largest absolute score of a text, over all heads of the layer. Scores of
    the future are not counted: nobody looks at them.
    """
    largest = scores.tril().abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-30)
    step = largest / (2 ** (bits - 1) - 1)
    return (scores / step).round() * step


def read(model, tokens, change):
    """(loss, the largest absolute value of the residual stream) of tokens (B, T + 1).

    change(scores) takes the place of the scores, (B, H, T, T). Softmax's scores are its logits, and
    linear attention's its numerator without the mask. So compare them within a family only.
    """

    def changed_maps(layer, q, k, rope, log_D):
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

    largest = 0.0
    for _, _, _, x in look(model, tokens[:, :-1], changed_maps):
        largest = max(largest, x.abs().max().item())
    loss = F.cross_entropy(model.logits(x).flatten(0, 1), tokens[:, 1:].flatten())
    return loss.item(), largest


def measure(model, batches):
    """The largest score and residual, the loss, and what few bits add to it."""
    names = ["largest score", "largest residual", "exact", "8 bits", "6 bits", "4 bits"]
    found = dict.fromkeys(names, 0.0)

    def note(scores):
        largest = scores.tril().abs().max().item()  # of the past
        found["largest score"] = max(found["largest score"], largest)
        return scores

    for tokens in batches:
        exact, largest = read(model, tokens, note)
        found["largest residual"] = max(found["largest residual"], largest)
        found["exact"] += exact / len(batches)
        for bits in (8, 6, 4):
            rounded, _ = read(model, tokens, lambda scores: round_scores(scores, bits))
            found[f"{bits} bits"] += (rounded - exact) / len(batches)
    return found


def outliers(args, checkpoints):
    """The largest scores and activations (Table 5), and the cost of rounding scores (Figure 8)."""
    import pandas as pd

    if not all(run for _, _, run in checkpoints):
        raise UserError("--ckpt: outliers reads the text on which train.py has trained a model")
    run = checkpoints[0][2]
    manual = run["data"] == "pydoc_data.topics"  # the text that ships with Python
    _, val, _, about = load_data(None if manual else Path(run["data"]))
    if about["data_sha256"] != run["data_sha256"]:
        raise UserError(f"{run['data']} is not what these models were trained on any more")
    T = min(model.config.block_size for model, _, _ in checkpoints)
    sequences = min(val.sequences(T), TOKENS // T)
    tokens = np.stack([val.sequence(i, T) for i in range(sequences)])
    batches = torch.from_numpy(tokens).to(args.device).split(16)
    rows = []
    for model, arm, run in checkpoints:
        rows.append(dict(arm=arm, seed=run["seed"]) | measure(model, batches))
    runs = pd.DataFrame(rows)
    table = report.average(runs, ["arm"], list(runs.columns[2:]))
    tables = {"The largest absolute values, val loss, and what it gains with rounded scores": table}
    about = dict(tokens=f"{sequences * T:,} of val in sequences of {T}")
    about |= report.conditions_of([run for _, _, run in checkpoints])
    figure, (left, right) = report.new_figure(columns=2, width=11, height=5, sharey=True)
    report.dots(left, runs, "largest residual")
    left.set(xlabel="largest residual", xlim=(0, None))
    report.dots(right, runs, "4 bits")
    right.set(xlabel="cost of 4 bits, nats", xlim=(0, None))
    report.publish(args.out, "outliers", "Outliers and rounding", tables, rows, about, figure)


def layer_and_head(text):
    """The type of --head: "18.6" is layer 18, head 6."""
    layer, _, head = text.partition(".")
    if not (layer.isdigit() and head.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a layer and a head, like 18.6")
    return int(layer), int(head)


@torch.no_grad()
def main(argv=None):
    p = argparse.ArgumentParser(
        prog="python -m lab.maps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("measurement", nargs="?", choices=["maps", "outliers"], default="maps")
    p.add_argument("--ckpt", type=path, nargs="+", help="files or folders (the newest below out/)")
    p.add_argument("--text", default="def next_line(line): return next(line)", help="of the maps")
    p.add_argument("--layer", type=positive, help="the one in the figure of the maps (the last)")
    p.add_argument("--head", type=layer_and_head, help="one head of one layer, like 18.6, from 0")
    p.add_argument("--minus", type=number, help="also shows A - minus U, U the average so far")
    p.add_argument("--out", type=path, default=Path("out/maps"), help="folder (%(default)s)")
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
