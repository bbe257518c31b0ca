"""
The paper's measurements of trained models. Each writes <out>/<name>.md, .json and .png.

    python -m experiments.checkpoints slices --ckpt out/softmax* out/diff*
    python -m experiments.checkpoints context --ckpt out/softmax* --contexts=8,32,128
    python -m experiments.checkpoints maps --ckpt out/diff --text="The cat sat on the mat."

`--help` lists them, and `slices --help` says what one of them measures. A checkpoint is a file or
the folder of a run. Checkpoints that differ in their seed alone are averaged. Tables, figures and
sections are those of Differential Transformer, arXiv 2410.05258.
"""
import argparse
import math
import sys
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

import report
from bench import add_verb, arm_names
from data import get_tokenizer, load_data
from flags import comma_list, positive_int
from model import GPT, Softmax, open_device

MANUAL = "pydoc_data.topics"  # what a run's log calls the manual that ships with Python
# the bars of a dot_plot. The ± of the tables is something else: each arm's own standard deviation
BARS = "bars: 95 % intervals of the means, from the sd that all arms share"


# checkpoints and their data


class Checkpoint(NamedTuple):
    model: GPT
    enc: object  # its tokenizer
    arm: str  # what tells it from the others, but for the seed
    seed: int
    run: dict  # the head of its log


class Text(NamedTuple):
    """What the checkpoints are measured on."""

    train: object
    val: object  # Shards, both
    block: int  # tokens of a sequence: the smallest block_size of the checkpoints
    tokens: int  # how many to measure, about
    device: torch.device
    about: dict  # which data that is


def open_checkpoints(args):
    """The checkpoints of --ckpt. ValueError for one that is not there, or not of train.py."""
    models = []
    runs = []
    for path in args.ckpt:
        if path.is_dir():
            path = path / "ckpt.pt"
        if not path.exists():
            raise ValueError(f"--ckpt: there is no checkpoint {path}. train.py writes them")
        model = GPT.load(path, args.device).eval()
        if "run" not in model.extra or "tokenizer" not in model.extra:
            raise ValueError(f"{path} does not say what it was trained on, as those of train.py do")
        models.append(model)
        # of one run there may be an early and a late checkpoint: the steps done tell them apart
        runs.append(asdict(model.config) | model.extra["run"] | dict(steps=model.extra["step"]))
    # arms may have different rates, which need not stand in their names
    names = arm_names([run | dict(lr=None) for run in runs])
    if len(set(names)) < len(set(arm_names(runs))):
        names = arm_names(runs)
    found = []
    for model, run, arm in zip(models, runs, names):
        enc = get_tokenizer(model.extra["tokenizer"])
        found.append(Checkpoint(model, enc, arm, run["seed"], run))
    if len({(checkpoint.arm, checkpoint.seed) for checkpoint in found}) < len(found):
        raise ValueError("--ckpt names a checkpoint twice")
    return found


def open_text(args, checkpoints):
    """The data that the checkpoints were trained on, or --data. ValueError if they don't fit."""
    first = checkpoints[0]
    path = args.data
    if path is None and first.run["data"] != MANUAL:
        path = Path(first.run["data"])
    train_split, val, tokenizer, what = load_data(path)
    name = what["data"]
    for checkpoint in checkpoints:
        own = checkpoint.model.extra["tokenizer"]
        if own != tokenizer:
            raise ValueError(f"{checkpoint.arm} has the tokenizer {own}, {name} is in {tokenizer}")
        if args.data is None and checkpoint.run["data_sha256"] != what["data_sha256"]:
            raise ValueError(
                f"{checkpoint.arm} was trained on other data than {name} is now: give --data"
            )
    block = min(checkpoint.model.config.block_size for checkpoint in checkpoints)
    if val.sequences(block) == 0:
        raise ValueError(f"the val split of {name} has not one sequence of {block} tokens")
    about = {"data": name, "val": what.get("val", "")}
    return Text(train_split, val, block, args.tokens, args.device, about)


def val_batches(text, T=None):
    """Val's first sequences, about text.tokens: (B, T + 1) at a time, B T at most 8,192."""
    T = T or text.block
    count = max(1, min(text.val.sequences(T), text.tokens // T))
    B = max(1, 8192 // T)
    for first in range(0, count, B):
        # the last batch may be smaller, nothing is compiled here
        sequences = [text.val.sequence(i, T) for i in range(first, min(first + B, count))]
        yield torch.from_numpy(np.stack(sequences)).to(text.device)


def token_losses(model, tokens):
    """The loss in nats of each token of (B, T + 1) given those before it: (B, T) float32."""
    logits, _ = model(tokens[:, :-1], tokens[:, 1:])
    return F.cross_entropy(logits.float().mT, tokens[:, 1:], reduction="none")


def val_losses(model, text, T=None, losses_of=token_losses):
    """The losses of val's first sequences, (sequences, T) float64."""
    parts = []
    for tokens in val_batches(text, T):
        parts.append(losses_of(model, tokens).double().cpu())
    return torch.cat(parts).numpy()


@contextmanager
def score_hook(model, hook):
    """Inside, the model runs by its maps, with hook(scores) in the place of the scores."""
    layers = [block.attn for block in model.blocks]
    for layer in layers:
        layer.flash = False
        layer.score_hook = hook
    try:
        yield
    finally:
        for layer in layers:
            layer.flash = model.config.flash
            layer.score_hook = None


@contextmanager
def watched(modules, look):
    """Inside, look(module, inputs, output) sees what these modules of a model do."""
    handles = [module.register_forward_hook(look) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_over(model, text):
    """Runs the model over val's first sequences, for those who watch it. Returns their tokens."""
    tokens_seen = 0
    for tokens in val_batches(text):
        model(tokens[:, :-1])
        tokens_seen += tokens[:, 1:].numel()
    return tokens_seen


# results


def average(rows, values, keys=()):
    """A row for each arm, with mean and standard deviation of its n seeds, as a data frame.

    rows: a list of dicts, one for each checkpoint, with arm, seed, the columns `keys` and `values`.
    """
    by = ["arm", *keys]
    table = []
    for key, group in pd.DataFrame(rows).groupby(by, sort=False):
        row = dict(zip(by, key)) | {"n": len(group)}
        for value in values:
            # each arm's own, not pooled: some of these numbers hardly differ and others very much
            row[value] = report.MeanError(group[value].mean(), group[value].std())
        table.append(row)
    return pd.DataFrame(table)


def publish(args, name, about, tables, figure, rows):
    """rows: what was measured of each checkpoint by itself, for the JSON. A list of dicts."""
    about = report.conditions(args.device, dtype="float32", **about)
    about["±"] = "standard deviation over n seeds"
    report.publish(args.out, name, about, tables, figure, pd.DataFrame(rows))


def to_long(rows, columns, x, y):
    """A data frame with a row for each of the columns: its name in x, its value in y."""
    df = pd.DataFrame(rows)
    rest = [column for column in df if column not in columns]
    return df.melt(rest, list(columns), var_name=x, value_name=y)


# slices


def ngrams(tokens, n, base):
    """The number of the n-gram that ends at each token from the n-th on, (..., T - n + 1)."""
    T = tokens.shape[-1]
    number = np.zeros((*tokens.shape[:-1], T - n + 1), np.int64)
    for i in range(n):
        number = number * base + tokens[..., i : T - n + 1 + i]
    return number


def frequent_ngrams(text, n, base, count):
    """The most frequent n-grams of the first training tokens, which make up half of them.

    Returns their numbers and a sentence that says which ones they are.
    """
    parts = []
    left = count
    for array in text.train.arrays:
        parts.append(array[:left])
        left -= len(parts[-1])
    tokens = np.concatenate(parts)
    seen = pd.Series(ngrams(tokens, n, base)).value_counts()  # the most frequent first
    half = seen.cumsum().searchsorted(seen.sum() / 2, side="right")
    often = int(seen.iloc[half])
    rule = f"{n}-grams seen more than {often:,} times in the first {len(tokens):,} training tokens"
    return seen.index[seen > often], rule


def find_hits(text, frequent, n, base):
    """Which targets of val's first sequences are AR-hits, (sequences, T) bool."""
    tokens = torch.cat(list(val_batches(text))).cpu().numpy()
    numbers = ngrams(tokens, n, base)
    again = np.stack([pd.Series(row).duplicated() for row in numbers])
    hits = again & ~np.isin(numbers, frequent)
    # the first target is the second token. The first n - 2 targets end no n-gram
    return np.pad(hits, ((0, 0), (n - 2, 0)))


def slices(args, checkpoints):
    """Val loss of the tokens that could be copied from the context, and of all others (Table 6).

    The slices are those of Zoology, arXiv 2312.04927. An AR-hit is the last token of an n-gram that
    stands in its context once before, so that it could be looked up there. The most frequent
    n-grams, those that make up half of the training data, don't count. n = 2 for gpt2 tokens and 5
    for bytes.
    """
    text = open_text(args, checkpoints)
    enc = checkpoints[0].enc
    n = 2 if enc.name == "gpt2" else 5
    frequent, rule = frequent_ngrams(text, n, enc.n_vocab, args.count)
    hits = find_hits(text, frequent, n, enc.n_vocab)
    rows = []
    for model, _, arm, seed, _ in checkpoints:
        losses = val_losses(model, text)
        row = dict(arm=arm, seed=seed, all=losses.mean())
        row["AR-hits"] = losses[hits].mean() if hits.any() else math.nan
        row["the rest"] = losses[~hits].mean() if not hits.all() else math.nan
        rows.append(row)
    caption = f"Val loss in nats per token; {hits.mean():.1%} of the tokens are AR-hits"
    tables = {caption: average(rows, ["all", "AR-hits", "the rest"])}
    df = to_long(rows, ["AR-hits", "the rest"], "slice", "loss")
    figure, (ax,) = report.new_figure(size=(9, 2 + 0.6 * df["arm"].nunique()))
    report.dot_plot(ax, df, "loss", row="arm", condition="slice")
    ax.set(xlabel=f"val loss, nats per token\n{BARS}")
    report.add_title(figure, "What the context held before (hollow), and the rest (filled)")
    about = text.about | {"tokens": hits.size, "context": text.block, "never a hit": rule}
    publish(args, "slices", about, tables, figure, rows)


# position and context


def windowed_losses(model, tokens):
    """token_losses with what the sampler sees: a cache that begins anew when it is full.

    The new one begins at the last half of the old one, see GPT.generate. (B, T + 1) to (B, T).
    """
    block = model.config.block_size
    T = tokens.shape[1] - 1
    parts = []
    done = 0  # targets whose loss we have
    start = 0  # of the cache
    while done < T:
        end = min(start + block, T)
        losses = token_losses(model, tokens[:, start : end + 1])
        parts.append(losses[:, done - start :])
        done = end
        start = end - max(1, block // 2) + 1
    return torch.cat(parts, dim=1)


def position_ends(length, block):
    """Where the positions are cut: powers of two from 16 on, the block, and the length."""
    ends = {length, min(block, length)}
    end = 16
    while end < length:
        ends.add(end)
        end *= 2
    return sorted(ends)


def position(args, checkpoints):
    """Mean loss by position in the text, up to and beyond the trained block (Figure 4).

    Every arm sees its whole context. The softmax arms are shown once more as sample.py runs them
    ("window"): their cache begins anew from its last half whenever it is full. Each position has
    other targets. To compare contexts on the same targets, see the measurement `context`.
    """
    text = open_text(args, checkpoints)
    length = args.length or 4 * text.block
    if text.val.sequences(length) == 0:
        tokens = text.val.tokens
        raise ValueError(f"the val split has {tokens:,} tokens, too few for --length={length}")
    ends = position_ends(length, text.block)
    starts = [0, *ends[:-1]]
    spans = [f"{start + 1:,} to {end:,}" for start, end in zip(starts, ends)]
    between = []
    up_to = []
    curves = []
    for model, _, arm, seed, _ in checkpoints:
        ways = {arm: token_losses}
        if isinstance(model.blocks[0].attn, Softmax):
            ways[f"{arm}, window"] = windowed_losses
        for name, losses_of in ways.items():
            losses = val_losses(model, text, length, losses_of)
            key = dict(arm=name, seed=seed)
            between.append(dict(key))
            up_to.append(dict(key))
            for span, start, end in zip(spans, starts, ends):
                loss = losses[:, start:end].mean()
                between[-1][span] = loss
                up_to[-1][f"{end:,}"] = losses[:, :end].mean()
                curves.append(key | dict(end=end, loss=loss))
    tables = {
        "Mean loss between positions (nats per token)": average(between, spans),
        "Mean loss up to a position": average(up_to, [f"{end:,}" for end in ends]),
    }
    figure = draw_position(curves, text.block)
    about = text.about | dict(tokens=losses.size, trained_block=text.block)
    publish(args, "position", about, tables, figure, between)


def draw_position(curves, block):
    df = pd.DataFrame(curves)
    figure, (ax,) = report.new_figure(size=(9, 5))
    report.line_plot(ax, df, "end", "loss", by="arm", seed="seed")
    ax.axvline(block, color="black", linewidth=0.8, linestyle=":")
    label_powers(ax, df["end"])
    ax.set(xlabel="position in the text (dotted: the end of the trained block)",
           ylabel="val loss, nats per token")
    report.label_ends(ax)
    title = "The loss by position: each point is the mean of the tokens since the point before"
    report.add_title(figure, title)
    return figure


def label_powers(ax, numbers):
    """A logarithmic x axis with these numbers as its ticks."""
    ax.set_xscale("log")
    ticks = sorted(set(numbers))
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.minorticks_off()


def cut_losses(model, windows):
    """The loss of the last token of each window (N, c + 1), given the c tokens before it: (N,)."""
    parts = []
    size = max(1, 8192 // windows.shape[1])
    for some in windows.split(size):
        logits, _ = model(some[:, :-1])
        parts.append(F.cross_entropy(logits[:, -1].float(), some[:, -1], reduction="none"))
    return torch.cat(parts)


def draw_context(df):
    """What it costs each arm to see the last tokens only."""
    df["context"] = df["context"].str.replace(",", "").astype(int)
    figure, (ax,) = report.new_figure(size=(9, 5))
    report.line_plot(ax, df, "context", "cost", by="arm", seed="seed")
    label_powers(ax, df["context"])
    ax.axhline(0, color="#777777", linewidth=1)
    ax.set(xlabel="how many of the last tokens a model sees (thin lines: single seeds)",
           ylabel="change of the loss, nats per token\n(below 0: better without older tokens)")
    report.label_ends(ax)
    means = df.groupby(["arm", "context"], sort=False)["cost"].mean().groupby("arm").min()
    better = ", ".join(means.index[means < -0.01]) or "no arm"
    report.add_title(figure, f"Better when the older tokens are hidden: {better}")
    return figure


def context(args, checkpoints):
    """How much of the loss needs more than a few tokens of context.

    The targets are the tokens in the second half of val's first sequences, about --tokens of
    them. Each is predicted from the last 8, 32, ... tokens before it alone, and from all of its
    sequence. The second table is what the cut costs: what needs more context than that.
    """
    text = open_text(args, checkpoints)
    T = text.block
    first = T // 2  # the context of the first target
    if max(args.contexts) > first:
        raise ValueError(f"--contexts: at most {first}, half of a block, else nothing would be cut")
    text = text._replace(tokens=2 * text.tokens)  # half of the tokens of a sequence are targets
    names = [f"{c:,}" for c in args.contexts]
    whole = f"all ({first + 1:,} to {T:,})"
    rows = []
    costs = []
    for model, _, arm, seed, _ in checkpoints:
        losses = {name: [] for name in [*names, whole]}
        for tokens in val_batches(text):
            losses[whole].append(token_losses(model, tokens)[:, first:].flatten())
            # target number t is token t + 1, and a window holds it and the c tokens before it
            for c, name in zip(args.contexts, names):
                windows = tokens[:, first + 1 - c :].unfold(1, c + 1, 1)  # (B, T - first, c + 1)
                losses[name].append(cut_losses(model, windows.flatten(0, 1)))
        means = {name: torch.cat(parts).double().mean().item() for name, parts in losses.items()}
        targets = sum(len(part) for part in losses[whole])
        rows.append(dict(arm=arm, seed=seed) | means)
        cost = {name: means[name] - means[whole] for name in names}
        costs.append(dict(arm=arm, seed=seed) | cost)
    tables = {
        "Val loss in nats per token, by the tokens of context": average(rows, [*names, whole]),
        "What needs more context than that, nats per token": average(costs, names),
    }
    figure = draw_context(to_long(costs, names, "context", "cost"))
    about = text.about | dict(targets=targets, block=T)
    publish(args, "context", about, tables, figure, rows)


# outliers, residual


class Extremes:
    """Collects the largest absolute values of tensors, and a sample for the median."""

    def __init__(self):
        self.largest = torch.zeros(0)
        self.sample = []

    def add(self, x):
        x = x.detach().abs().flatten().float()
        # the 100 largest of all are among the 100 largest of each
        tops = x.topk(min(100, len(x))).values.cpu()
        self.largest = torch.cat((self.largest, tops)).sort(descending=True).values[:100]
        # 10,007 is a prime: the sample does not fall into step with the rows of a map
        places = torch.arange(100_003, device=x.device) * 10_007 % len(x)
        self.sample.append((x if len(x) < len(places) else x[places]).cpu())

    def row(self):
        row = {}
        for k in (1, 2, 3, 10, 100):
            row[f"top-{k}"] = self.largest[k - 1].item() if k <= len(self.largest) else math.nan
        row["median"] = torch.cat(self.sample).median().item()
        return row


def outliers(args, checkpoints):
    """The largest scores and activations beside their median (Table 5).

    Absolute values over all layers, heads and tokens: of the scores on and below the diagonal,
    for each branch of a difference (attention logits in the softmax arms, products of features
    before the division in the linear ones: compare within a family only), and of the residual
    stream behind each block. The median is that of a sample.
    """
    text = open_text(args, checkpoints)
    causal = torch.ones(text.block, text.block, dtype=torch.bool, device=args.device).tril()
    rows = []
    for model, _, arm, seed, _ in checkpoints:
        branches = model.blocks[0].attn.branches
        scores = [Extremes() for _ in range(branches)]
        stream = Extremes()

        def look(S):
            for number, extremes in enumerate(scores):
                extremes.add(S[:, number :: len(scores)][..., causal])
            return S

        def look_at_stream(block, inputs, y):
            stream.add(y)

        with score_hook(model, look), watched(model.blocks, look_at_stream):
            tokens_seen = run_over(model, text)
        names = ["scores"] if branches == 1 else ["scores, branch 1", "scores, branch 2"]
        for name, extremes in zip([*names, "residual stream"], [*scores, stream]):
            rows.append(dict(arm=arm, seed=seed, of=name) | extremes.row())
    values = ["top-1", "top-2", "top-3", "top-10", "top-100", "median"]
    table = average(rows, values, keys=["of"]).sort_values("of", kind="stable")
    figure = draw_outliers(rows)
    about = text.about | dict(tokens=tokens_seen, context=text.block)
    publish(args, "outliers", about, {"The largest absolute values": table}, figure, rows)


def draw_outliers(rows):
    """For each arm the median and the largest value, a dot for each seed."""
    df = pd.DataFrame(rows).sort_values("of", kind="stable")
    df["row"] = df["arm"] + ": " + df["of"]
    names = list(df["row"].unique())
    heights = df["row"].map(names.index)
    figure, (ax,) = report.new_figure(size=(10, 2 + 0.5 * len(names)))
    ax.plot(df["median"], heights, "o", color="black", markerfacecolor="white", markersize=8)
    ax.plot(df["top-1"], heights, "o", color="black", markersize=8)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set(xscale="log", xlabel="absolute value")
    report.add_title(figure, "The median (hollow) and the largest value (filled)")
    return figure


def stream_norms(model, text):
    """Mean length of a token's vector behind each part of the model, and how many tokens."""
    names = {model.wte: "embedding"}
    for depth, block in enumerate(model.blocks):
        names[block] = f"block {depth}"
    sums = dict.fromkeys(names.values(), 0.0)

    def look(module, inputs, y):
        sums[names[module]] += y.norm(dim=-1).double().sum().item()

    with watched(names, look):
        tokens_seen = run_over(model, text)
    return {name: total / tokens_seen for name, total in sums.items()}, tokens_seen


def residual(args, checkpoints):
    """Length of the residual stream by layer, at the start of training and at the end.

    The length ||x|| of a token's vector as the embedding and then each block leave it, the mean
    over val tokens. At the start: the weights drawn anew from the run's seed. Shows what the norm
    on each head's output does at first.
    """
    text = open_text(args, checkpoints)
    rows = []
    for model, _, arm, seed, run in checkpoints:
        new = GPT(model.config, run["seed"]).to(args.device)
        for when, one in (("start", new), ("end", model)):
            norms, tokens_seen = stream_norms(one, text)
            rows.append(dict(arm=arm, seed=seed, at=when) | norms)
    names = list(norms)
    table = average(rows, names, keys=["at"])
    df = to_long(rows, names, "layer", "norm")
    df["layer"] = df["layer"].map(names.index)  # a line goes from left to right by numbers
    figure, axes = report.new_figure(columns=2, size=(14, 5))
    for ax, when in zip(axes, ("start", "end")):
        report.line_plot(ax, df[df["at"] == when], "layer", "norm", by="arm", seed="seed")
        ax.set_xticks(range(len(names)), names)
        ax.set(ylabel="length of a token's vector", title=f"at the {when} of training")
        report.label_ends(ax)
    report.add_title(figure, "The residual stream by layer")
    about = text.about | dict(tokens=tokens_seen, context=text.block)
    tables = {"Length of the residual stream, mean over tokens": table}
    publish(args, "residual", about, tables, figure, rows)


# quant


def round_scores(S, bits, dims):
    """S in 2^(bits - 1) - 1 steps either side of zero, up to its largest value over dims.

    Only entries on and below the diagonal count: nobody looks at the others.
    """
    largest = S.tril().abs().amax(dims, keepdim=True).clamp(min=1e-30)
    step = largest / (2 ** (bits - 1) - 1)
    return (S / step).round() * step


def quant(args, checkpoints):
    """Val loss with the scores rounded to few bits (Figure 8).

    The scores, before the mask and the softmax, are rounded to 2^(bits - 1) - 1 steps either side
    of zero. The last step is the largest absolute score. It is taken of each text and layer, over
    all heads and branches, or with --per=head of each head.
    """
    text = open_text(args, checkpoints)
    dims = (1, 2, 3) if args.per == "layer" else (2, 3)
    names = ["8 bits", "6 bits", "4 bits"]
    rows = []
    above = []
    for model, _, arm, seed, _ in checkpoints:
        with score_hook(model, None):  # by the maps as well, so that only the rounding differs
            losses = val_losses(model, text)
        row = dict(arm=arm, seed=seed, exact=losses.mean())
        for bits in (8, 6, 4):
            with score_hook(model, partial(round_scores, bits=bits, dims=dims)):
                row[f"{bits} bits"] = val_losses(model, text).mean()
        rows.append(row)
        above.append(dict(arm=arm, seed=seed) | {name: row[name] - row["exact"] for name in names})
    tables = {
        "Val loss in nats per token, scores rounded": average(rows, ["exact", *names]),
        "The same above that of exact scores": average(above, names),
    }
    df = to_long(above, names, "scores", "above")
    figure, (ax,) = report.new_figure(size=(9, 5))
    df["bits"] = df["scores"].str[0].astype(int)
    report.line_plot(ax, df, "bits", "above", by="arm", seed="seed")
    ax.set(xlabel="bits of a score", ylabel="val loss above that of exact scores", xticks=[4, 6, 8])
    report.label_ends(ax)
    report.add_title(figure, "What it costs to round the scores")
    about = text.about | dict(tokens=losses.size, context=text.block, absmax=f"per {args.per}")
    publish(args, "quant", about, tables, figure, rows)


# hellaswag


def score_story(model, enc, story, block):
    """Mean and sum of the loss of each ending of a story, (4, 2), and whether it was cut."""
    start = enc.encode_ordinary(story["ctx"])
    endings = [enc.encode_ordinary(" " + ending) for ending in story["endings"]]
    texts = [torch.tensor((start + ending)[-block - 1 :]) for ending in endings]
    # padded at the end, which no token of the text attends to
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    losses = token_losses(model, padded.to(model.wte.weight.device)).cpu()
    scores = []
    for loss, text, ending in zip(losses, texts, endings):
        own = loss[: len(text) - 1][-len(ending) :]
        scores.append([own.mean().item(), own.sum().item()])
    return np.array(scores), len(start) + max(map(len, endings)) > block + 1


def hellaswag(args, checkpoints):
    """Zero-shot accuracy on HellaSwag, 10,042 unfinished stories with four endings (Section 3.1).

    Normalised accuracy: the ending whose tokens have the smallest mean loss, after the context
    and a space. (The acc_norm of lm-evaluation-harness divides the sum of the losses by the
    characters of the ending and not by its tokens, so the two may differ.) Beside it the accuracy
    by the sum of the losses. Guessing gets 0.25. A context too long for the block is cut from the
    left.
    """
    import datasets

    try:
        stories = datasets.load_dataset(args.source, split="validation")
    except Exception as e:  # no network, no folder, no such split: of many classes
        why = f"can't read HellaSwag from --source={args.source} (it may be a folder): {e}"
        raise ValueError(why) from None
    stories = stories.select(range(min(args.limit, len(stories)))).to_list()
    block = min(checkpoint.model.config.block_size for checkpoint in checkpoints)
    rows = []
    for model, enc, arm, seed, _ in checkpoints:
        right = []  # for each story, is the ending with the smallest mean, with the smallest sum
        contexts_cut = 0
        for story in stories:
            scores, was_cut = score_story(model, enc, story, block)
            right.append(scores.argmin(0) == int(story["label"]))
            contexts_cut += was_cut
        normalised, by_sum = np.mean(right, axis=0).tolist()
        error = math.sqrt(normalised * (1 - normalised) / len(stories))
        row = {"arm": arm, "seed": seed, "accuracy, normalised": normalised}
        row |= {"standard error": error, "accuracy, by sum": by_sum, "contexts cut": contexts_cut}
        rows.append(row)
    values = ["accuracy, normalised", "standard error", "accuracy, by sum"]
    table = average(rows, values, keys=["contexts cut"])
    figure, (ax,) = report.new_figure(size=(8, 2 + 0.5 * len(table)))
    report.dot_plot(ax, pd.DataFrame(rows), "accuracy, normalised", row="arm")
    ax.axvline(0.25, color="black", linewidth=0.8, linestyle=":")
    ax.set(xlabel=f"normalised accuracy (dotted: guessing)\n{BARS}")
    report.add_title(figure, "HellaSwag, zero-shot")
    about = {"source": args.source, "stories": len(stories), "context": block}
    publish(args, "hellaswag", about, {"HellaSwag, zero-shot": table}, figure, rows)


# maps


def attention_maps(model, idx):
    """Every layer's maps of idx (B, T): a list of dicts of (B, h, T, T).

    A one-map arm has {"A"}, a differential one {"A_1", "A_2", "A_1 − λA_2"}.
    """
    found = []

    def look(layer, inputs, y):
        x = inputs[0]  # behind the norm of the block
        q, k, _, lam = layer.project(x)
        rope = layer.rope_from_0(x)
        A = layer.attention_map(q, k, lam, rope)
        if layer.branches == 1:
            found.append({"A": A})
            return
        # the map is A_1 - lambda A_2: with lambda 0 it is A_1, and with 1 A_1 - A_2
        A_1 = layer.attention_map(q, k, 0.0, rope)
        A_2 = A_1 - layer.attention_map(q, k, 1.0, rope)
        found.append({"A_1": A_1, "A_2": A_2, "A_1 − λA_2": A})

    with watched([block.attn for block in model.blocks], look):
        model(idx)
    return found


def describe_map(A):
    """A few numbers of a layer's map A (h, T, T), shares of absolute values."""
    size = A.abs().sum(-1)
    return {
        "smallest": A.min().item(),
        "largest": A.max().item(),
        "sum of a row": A.sum(-1).mean().item(),
        "negative share": ((-A).clamp(min=0).sum() / size.sum()).item(),
        "on the first token": (A[..., 0].abs() / size).mean().item(),
    }


def maps(args, checkpoints):
    """The attention maps of a text, and for a difference those of both branches (Figure 1).

    Row i is how token i mixes the tokens before it. A weight is negative where lambda A_2 is larger
    than A_1. The table is of all layers, the figure of one: the mean over the heads, and then the
    heads one by one, at most four.
    """
    tokenizers = {checkpoint.enc.name for checkpoint in checkpoints}
    if len(tokenizers) > 1:  # their maps have other tokens, and the figure writes them only once
        names = " and ".join(sorted(tokenizers))
        raise ValueError(f"--ckpt: maps need checkpoints of one tokenizer, these have {names}")
    layer = args.layer or min(checkpoint.model.config.n_layer for checkpoint in checkpoints)
    rows = []
    shown = {}
    for model, enc, arm, seed, _ in checkpoints:
        tokens = enc.encode_ordinary(args.text)
        if not 1 < len(tokens) <= 256 or layer > model.config.n_layer:
            limit = model.config.n_layer
            raise ValueError(f"{arm} needs a --text of 2 to 256 tokens and a --layer up to {limit}")
        found = attention_maps(model, torch.tensor([tokens], device=args.device))
        for depth, of_layer in enumerate(found, 1):
            for name, A in of_layer.items():
                numbers = describe_map(A[0].float().cpu())
                rows.append(dict(arm=arm, seed=seed, layer=depth, map=name) | numbers)
        if arm not in shown:  # the first of the seeds
            shown[arm] = {name: A[0].float().cpu() for name, A in found[layer - 1].items()}
    words = [enc.decode([token]).replace(" ", "␣").replace("\n", "↵") for token in tokens]
    words = [word.replace("$", r"\$") for word in words]  # matplotlib takes a $ for mathematics
    values = ["smallest", "largest", "sum of a row", "negative share", "on the first token"]
    table = average(rows, values, keys=["layer", "map"])
    tables = {"Attention maps (shares are of absolute values)": table}
    about = {"text": repr(args.text), "layer shown": layer}
    publish(args, "maps", about, tables, draw_maps(shown, words, layer), rows)


def draw_maps(shown, words, layer):
    """A row for each arm: the mean over the heads of its maps, and the last map by head."""
    panels = {}
    for arm, of_arm in shown.items():
        panels[arm] = {f"{name}, mean of heads": A.mean(0) for name, A in of_arm.items()}
        name, A = list(of_arm.items())[-1]
        for head in range(min(4, len(A))):
            panels[arm][f"{name}, head {head + 1}"] = A[head]
    # an arm with fewer heads leaves the last panels of its row empty
    columns = max(len(of_arm) for of_arm in panels.values())
    size = (3.1 * columns + 1, 3.3 * len(panels) + 1)
    figure, axes = report.new_figure(rows=len(panels), columns=columns, size=size)
    entries = []
    for of_arm in panels.values():
        entries += [A[A != 0].abs() for A in of_arm.values()]
    # the few that are larger would leave no colour for the rest
    largest = torch.cat(entries).quantile(0.99).item()
    for number, (arm, of_arm) in enumerate(panels.items()):
        of_row = axes[number * columns : (number + 1) * columns]
        for ax in of_row[len(of_arm) :]:
            ax.set_visible(False)
        for ax, (title, A) in zip(of_row, of_arm.items()):
            future = np.triu(np.ones(A.shape, bool), 1)
            A = np.ma.masked_where(future, A.numpy())
            image = ax.imshow(A, cmap="PuOr", vmin=-largest, vmax=largest)
            ax.set_title(f"{arm}: {title}", fontsize=9)
            ax.grid(False)
            ax.set(xticks=[], yticks=[])
            if len(words) <= 32:
                ax.set_xticks(range(len(words)), words, fontsize=6)
                ax.set_yticks(range(len(words)), words, fontsize=6)
    label = "weight (1 % are beyond the ends)"
    figure.colorbar(image, ax=list(axes), shrink=0.6, extend="both", label=label)
    title = f"Layer {layer}: row i is what token i takes from the tokens before it"
    report.add_title(figure, title)
    return figure


# the command line


def add_measurement(verbs, measure):
    """A subcommand and the flags that all of them have."""
    p = add_verb(verbs, measure, out="out/checkpoints")
    p.add_argument("--ckpt", type=Path, nargs="+", required=True,
                   help="checkpoints, or the folders of runs")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                   help="cuda, cpu, ... (%(default)s)")
    return p


def add_text_flags(p, on_cpu, on_cuda):
    """The flags of a measurement on val."""
    p.add_argument("--data", type=Path, help="shards or text file (what the runs were trained on)")
    p.add_argument("--tokens", type=positive_int,
                   help=f"val tokens to measure, about ({on_cpu:,}; on cuda {on_cuda:,})")
    p.set_defaults(tokens_on={"cpu": on_cpu, "cuda": on_cuda})


def make_parser():
    p = argparse.ArgumentParser(
        prog="python -m experiments.checkpoints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = p.add_subparsers(required=True, metavar="measurement")

    of_slices = add_measurement(verbs, slices)
    add_text_flags(of_slices, on_cpu=65_536, on_cuda=4_000_000)
    of_slices.add_argument("--count", type=positive_int, default=50_000_000,
                           help="training tokens whose n-grams are counted (5e7)")

    of_position = add_measurement(verbs, position)
    add_text_flags(of_position, on_cpu=65_536, on_cuda=4_000_000)
    of_position.add_argument("--length", type=positive_int, help="tokens to go up to (four blocks)")

    of_context = add_measurement(verbs, context)
    add_text_flags(of_context, on_cpu=4_096, on_cuda=65_536)
    of_context.add_argument("--contexts", type=comma_list(positive_int), default="8,32,128",
                            help="tokens of context that are left, a comma list (%(default)s)")

    of_outliers = add_measurement(verbs, outliers)
    add_text_flags(of_outliers, on_cpu=32_768, on_cuda=400_000)

    of_residual = add_measurement(verbs, residual)
    add_text_flags(of_residual, on_cpu=32_768, on_cuda=400_000)

    of_quant = add_measurement(verbs, quant)
    add_text_flags(of_quant, on_cpu=16_384, on_cuda=1_000_000)
    of_quant.add_argument("--per", choices=["layer", "head"], default="layer",
                          help="take the largest score of a layer or of each head (%(default)s)")

    of_hellaswag = add_measurement(verbs, hellaswag)
    of_hellaswag.add_argument("--source", default="Rowan/hellaswag",
                              help="data set on the hub, or a folder (%(default)s)")
    of_hellaswag.add_argument("--limit", type=positive_int, default=10_042,
                              help="stories, from the first on (all %(default)s)")

    of_maps = add_measurement(verbs, maps)
    of_maps.add_argument("--text", default="The cat sat on the mat.",
                         help="what the maps are of (%(default)s)")
    of_maps.add_argument("--layer", type=positive_int,
                         help="the layer in the figure, from 1 (the last)")
    return p


@torch.no_grad()
def main(argv=None):
    args = make_parser().parse_args(argv)
    args.device = open_device(args.device)
    if hasattr(args, "tokens_on") and args.tokens is None:
        args.tokens = args.tokens_on["cuda" if args.device.type == "cuda" else "cpu"]
    report.check_can_publish(args.out)
    args.verb(args, open_checkpoints(args))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ImportError) as e:
        sys.exit(f"experiments.checkpoints: {e}")
