"""
Is it this list's own average that a minus should take away, or would another list's do?

    python -m lab.real lists

A list has 32 lines like "Name: word", an empty line, three of the lines again, and a name with a
colon. The right answer is the word of its line. m of the wrong lines, the crowd, have one word in
common, and no example is one of them. While the model reads, its look-up heads (lab/ceiling.py) put
out y - u/2 for every token but the first, where u is

    nothing    0
    own        the mean of the head's values so far, without the first token's
    another    that of another list at the same place, with as large a crowd, but no name and no
               word of this one. It is itself read with the mean of this list
    fixed      one vector a head: the mean value of all tokens but the first of 20 further lists

Predicted: in the log-probability of the right word, [own - another] at m = 16 less the same at
m = 0 is 0.05 to 0.14, with an interval above 0, and at m = 0 alone it is within 0.06 of nothing.
"""
import random
import re

import numpy as np
import torch

from lab import ceiling, stats
from lab.ceiling import HEADS, TEXTS, change, interval, load
from model import upcast

LISTS = 300
BATCH = 10
LINES = 32
SEED = "whose average"
MEANS = {
    "nothing": lambda layer, u: torch.zeros_like(u),
    "own": lambda layer, u: u,
    # the second half of a batch are the partners of the first half
    "another": lambda layer, u: u.roll(len(u) // 2, dims=0),
    "fixed": lambda layer, u: layer.fixed.expand_as(u),
}

# ---- the lists

def find_words(enc):
    """Names like "Water", words like "house": a token each. Some are beginnings, like "illust"."""
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


def make_list(pools, number, crowd):
    """(text, the right word). Two lists of one number differ in the crowd alone."""
    rng = random.Random(f"{SEED} {number}")
    names = rng.sample(pools[0], LINES)
    words = rng.sample(pools[1], LINES)
    right, *others = rng.sample(range(LINES), LINES)
    for line in others[:crowd]:
        words[line] = words[others[0]]
    lines = [f"{name}: {word}" for name, word in zip(names, words)]
    examples = [lines[i] for i in others[-3:]]
    text = "\n".join([*lines, "", *examples, f"{names[right]}:"])
    return text, words[right]


def find_partner(pools, number):
    """The number of another list that has no name and no word of this one."""
    def words_of(number):
        return set(make_list(pools, number, crowd=0)[0].replace(":", " ").split())

    other = number + 1000
    while words_of(number) & words_of(other):
        other += 1000
    return other


# ---- the model reads them

def lose_half(mean):
    """What heads lose, as `change` takes it. mean: see MEANS."""
    def taken(layer, A, v):
        n = torch.arange(v.shape[-2])[:, None]  # (T, 1), places without the first token
        u = (v.cumsum(-2) - v[..., :1, :]) / n.clamp(min=1)  # (B, h, T, d), the running mean
        return mean(layer, u) * (n > 0) / 2

    return taken


def find_fixed(model, enc, pools):
    """Keeps the fixed vectors of the look-up heads in their layers, (1, h, 1, d)."""
    def keep(layer, u):
        layer.fixed = u[:, :, -1:].mean(0, keepdim=True)
        return torch.zeros_like(u)

    change(model, HEADS["look-up"], lose_half(keep))
    answer(model, enc, [make_list(pools, number, crowd=0) for number in range(100_000, 100_020)])


@torch.inference_mode()
def answer(model, enc, batch):
    """By list, whether the right word is the likeliest one (1 or 0), and its log p in nats."""
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = model(torch.tensor([enc.encode(text) for text, _ in batch]))
    logp = upcast(logits[:, -1]).log_softmax(-1)
    words = [enc.encode_single_token(f" {right}") for _, right in batch]
    rows = list(zip(logp, words))
    return dict(
        right=[int(row.argmax() == word) for row, word in rows],
        logp=[round(row[word].item(), 4) for row, word in rows],
    )


def lists(folder):
    model, enc = load(folder)
    pools = find_words(enc)
    find_fixed(model, enc, pools)

    def measure(what, mean, crowd):
        change(model, HEADS["look-up"], lose_half(MEANS[mean]))
        found = dict(right=[], logp=[])
        for first in range(0, LISTS, BATCH):
            numbers = list(range(first, first + BATCH))
            if mean == "another":
                numbers += [find_partner(pools, number) for number in numbers]
            answers = answer(model, enc, [make_list(pools, number, crowd) for number in numbers])
            for name, values in answers.items():
                found[name] += values[:BATCH]
        return found

    wanted = []
    for mean in MEANS:
        wanted += [dict(what="lists", mean=mean, crowd=crowd) for crowd in (0, 16)]
    ceiling.do_runs(wanted, measure)


# ---- the page

def of_lists(runs, name):
    """{(mean, crowd): the values of this name by list}."""
    runs = [run for run in runs if run["what"] == "lists"]
    return {(run["mean"], run["crowd"]): np.array(run[name], dtype=float) for run in runs}


def table(runs):
    logp = of_lists(runs, "logp")
    right = of_lists(runs, "right")
    rows = []
    for mean in MEANS:
        row = {"half of": mean}
        for m in (0, 16):
            row[f"right, m = {m}"] = f"{100 * right[mean, m].mean():.1f} %"
        rows.append(row | contrast(logp, mean, None if mean == "nothing" else "nothing"))
    for base in ("another", "fixed"):
        rows.append({"half of": f"own less {base}"} | contrast(logp, "own", base))
    return stats.markdown(rows)


def contrast(values, mean, base):
    """What this mean has more than the base at each m, and the second less the first."""
    alone = values[mean, 0] - (values[base, 0] if base else 0)
    beside = values[mean, 16] - (values[base, 16] if base else 0)
    columns = {"log p, m = 0": alone, "m = 16": beside, "16 less 0": beside - alone}
    return {name: interval(x, 2) for name, x in columns.items()}


def show(ax, groups, places, label=None):
    """A dot for the mean of each group, with its interval."""
    mean, low, high = np.array([stats.bootstrap(group) for group in groups]).T
    ax.errorbar(places, mean, yerr=[mean - low, high - mean], fmt="o", capsize=4, label=label)
    ax.axhline(0, color="black", linewidth=1)


def figure(runs):
    """Left the gains on text, right what a list's own mean has more than another's."""
    drawn, (left, right) = stats.new_figure(columns=2, width=10, height=5)
    groups = [ceiling.read_by(runs, "look-up", text) for text in TEXTS]
    for name, shift in (("oracle", -0.1), ("votes", 0.1)):
        show(left, [ceiling.gains(group, name) for group in groups], [shift, 1 + shift], name)
    for y in (0.003, 0.02):  # between these, the page can't say
        left.axhline(y, color="black", linestyle="--", linewidth=1)
    left.set_xticks([0, 1], TEXTS)
    left.set(title="text: nats a token", xlim=(-0.5, 1.5), ylim=(-0.001, 0.03))
    left.legend(loc="upper right")
    logp = of_lists(runs, "logp")
    show(right, [logp["own", m] - logp["another", m] for m in (0, 16)], [0, 1])
    right.set_xticks([0, 1], ["no crowd", "16 agree"])
    right.set(title="lists: own − another's", xlim=(-0.5, 1.5))
    return drawn


def publish():
    """Renews the tables of the page, and draws its figure."""
    _, runs = stats.read_json(ceiling.RESULTS)
    page = ceiling.RESULTS.with_suffix(".md")
    picture = ceiling.RESULTS.with_suffix(".png")
    text = page.read_text(encoding="utf-8")
    for new in (ceiling.table(runs), table(runs)):
        header = re.escape(new.partition("\n")[0])
        text = re.sub(rf"{header}(\n\|.*)*", lambda _: new, text)
    page.write_text(text, encoding="utf-8")
    figure(runs).savefig(picture)
    print(f"-> {page}, {picture}")
