"""
What agreeing wrong words do to a look-up in a pretrained model, and what a minus does about it.

    python -m lab.pretrained out/smollm2
    python -m lab.crowd                  # the most important first. Stop it anywhere: it goes on

A list has N lines like `Name: word`, an empty line, three of the lines again, and a name with a
colon. The right answer is the word of its line. m of the wrong lines, the crowd, have one word in
common. The weights of the model stay as they are: while it reads, some heads put out something
else than y = A V, see Changed. The page has the predictions: lab/results/pretrained/README.md.
"""
import argparse
import hashlib
import pydoc_data.topics
import random
import re
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from common import UserError, cli, find_checkpoint, path
from data import get_tokenizer
from lab.sweep import Cache
from model import GPT, Attention, Softmax, upcast

LINES = {"colon": "{}: {}", "arrow": "{} -> {}"}  # each line is four tokens with its line break
EXAMPLES = 3  # lines that stand a second time. None of them is the right one or in the crowd
BATCH = 10  # lists that are read at a time
N_LOOKUP = 14  # heads, of which the first two are called sharp, and the others blunt
SEED = "reported"  # of the lists of all results
SEED_OF_CHOICE = "choice"  # of the lists that choose the heads


# -----------------------------------------------------------------------------
# the heads


class Changed(Softmax):
    """softmax, some of whose heads put out something else than their y = A V. s is the strength.

        average             y_i - s u_i             A - s U
        average_kept_sum    (y_i - s u_i) / (1 - s) (A - s U) / (1 - s), whose rows sum to 1 again
        louder              (1 + s) y_i             (1 + s) A
        own                 y_i - s v_i             A - s I

    u_i is the mean of the values so far, and U the map that takes it. With sink_out they leave out
    the first token, to which many heads give what they have no use for. The first token itself then
    has no mean, and nothing changes for it.
    """

    kind = "none"
    strength = 0.0
    sink_out = None
    chosen = None  # (H, 1, 1) bool: the heads that change
    watch = False  # whether to keep the last row of the maps, for `votes`
    last_row = None  # (B, H, T)

    # softmax's own would take the usual y from its cache. These fit any maps
    prefill = Attention.prefill
    step = Attention.step

    def change(self, y, average, own):
        """y are the outputs (B, H, T, d) or the maps (B, H, T, T), average and own accordingly."""
        s = self.strength
        match self.kind:
            case "none":
                return y
            case "average":
                changed = y - s * average
            case "average_kept_sum":
                changed = (y - s * average) / (1 - s)
            case "louder":
                changed = (1 + s) * y
            case "own":
                changed = y - s * own
        if self.sink_out:
            changed[:, :, 0] = y[:, :, 0]
        return torch.where(self.chosen, changed, y)

    def average(self, v):
        """u_i for each row of v (..., T, d). Of the identity it makes the map U."""
        total = upcast(v).cumsum(-2)
        n = torch.arange(1, v.shape[-2] + 1, device=v.device)[:, None]
        if self.sink_out:
            total = total - upcast(v[..., :1, :])
            n = (n - 1).clamp(min=1)
        return total / n

    def attention_map(self, q, k, lam, rope):
        A = super().attention_map(q, k, lam, rope)
        own = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        return self.change(A, self.average(own), own)

    def fast(self, q, k, v, lam, rope):
        if self.watch:
            self.last_row = self.attention_map(q, k, lam, rope)[:, :, -1]
        y = super().fast(q, k, v, lam, rope)
        if self.kind == "none":
            return y
        return self.change(upcast(y), self.average(v), upcast(v))


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
    for depth, block in enumerate(model.blocks):
        layer = block.attn
        chosen = [[depth, head] in heads for head in range(model.config.n_head)]
        layer.chosen = torch.tensor(chosen)[:, None, None]
        layer.kind = kind if any(chosen) else "none"
        layer.strength = strength
        layer.sink_out = sink_out


# -----------------------------------------------------------------------------
# the lists


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

    Lists of one number differ in the crowd alone, if place is "any". Lines are counted from 0.
    place: "before" and "after" put the right line there, seen from all lines of the crowd.
    """
    rng = random.Random(f"{seed} {number}")
    names = rng.sample(names, pairs)
    words = rng.sample(words, pairs)
    order = rng.sample(range(pairs), pairs)
    examples = order[-EXAMPLES:]
    chosen = order[: crowd + 1]
    assert not set(chosen) & set(examples), "the crowd is too large for other examples"
    if place == "before":
        chosen.sort()
    elif place == "after":
        chosen.sort(reverse=True)
    right, *crowd_lines = chosen
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


# -----------------------------------------------------------------------------
# what is measured. A list is read once, and only the logits of its last token are computed


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
    for block in model.blocks:
        block.attn.watch = True
    model(idx)
    rows = torch.stack([block.attn.last_row for block in model.blocks], dim=1)  # (B, layers, H, T)
    for block in model.blocks:
        block.attn.watch = False
    r = torch.stack([row[..., right] for row, (right, _) in zip(rows, places)])  # (B, layers, H)
    c = torch.stack([row[..., crowd].sum(-1) for row, (_, crowd) in zip(rows, places)])
    found = dict(r=r, c=c, wins=(c > r).float())
    return {name: (x.mean(0) * 1e5).round().div(1e5).tolist() for name, x in found.items()}


def read_text(enc):
    """A text with a known licence that everybody has: the manual in Python's help()."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(enc.encode(text)), hashlib.sha256(text.encode()).hexdigest()


@torch.inference_mode()
def text_loss(model, text, tokens, sequences=8):
    """The mean loss of each of 8 sequences in nats per token. They begin at 8 fixed places."""
    losses = []
    for i in range(sequences):
        start = i * len(text) // sequences
        idx = text[start : start + tokens + 1][None]
        with torch.autocast("cpu", torch.bfloat16):
            _, loss = model(idx[:, :-1], idx[:, 1:])
        losses.append(round(loss.item(), 5))
    return losses


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


# -----------------------------------------------------------------------------
# the experiment


def condition(heads="none", kind="none", strength=0, sink_out=None):
    if kind.startswith("average") and sink_out is None:
        sink_out = True
    return dict(heads=heads, kind=kind, strength=strength, sink_out=sink_out)


PRIMARY = [condition(), condition("lookup", "average", 0.5), condition("lookup", "louder", 0.5)]


def other_conditions():
    found = []
    for heads in ("sharp", "blunt", "random", "all"):
        found.append(condition(heads, "average", 0.5))
        found.append(condition(heads, "louder", 0.5))
    found.append(condition("lookup", "own", 0.5))
    found.append(condition("lookup", "average_kept_sum", 0.5))
    found.append(condition("lookup", "average", 0.5, sink_out=False))
    for strength in (1, 0.25, 0.75):
        found.append(condition("lookup", "average", strength))
        found.append(condition("lookup", "louder", strength))
    found.append(condition("lookup", "average_kept_sum", 0.25))
    found.append(condition("lookup", "own", 1))
    found.append(condition("lookup", "average", 1, sink_out=False))
    for heads in ("sharp", "blunt", "random", "all"):
        found.append(condition(heads, "average", 1))
        found.append(condition(heads, "louder", 1))
    return found


def cells():
    """What is run, in this order: (what, number of lists, its settings)."""
    for change in PRIMARY:
        for crowd in (0, 16):
            yield "lists", 300, make_cell(crowd, change)
    for change in PRIMARY:
        yield "text", 0, dict(tokens=1024) | change
    for crowd in (0, 8, 16, 24, 28):
        yield "votes", 200, make_cell(crowd)
    for change in PRIMARY:
        for crowd in (0, 16):
            yield "lists", 60, make_cell(crowd, change, style="arrow")
    for change in other_conditions():
        for crowd in (0, 16):
            yield "lists", 60, make_cell(crowd, change)
        yield "text", 0, dict(tokens=1024) | change
    for place in ("before", "after"):
        yield "votes", 60, make_cell(16, place=place)
        for change in PRIMARY:
            yield "lists", 60, make_cell(16, change, place=place)
    for crowd in (0, 16, 32, 48, 60):
        yield "votes", 60, make_cell(crowd, pairs=64)
    for change in PRIMARY:
        for tokens in (256, 2048):
            yield "text", 0, dict(tokens=tokens) | change


def make_cell(crowd, change=None, pairs=32, place="any", style="colon"):
    cell = dict(pairs=pairs, crowd=crowd, place=place, style=style)
    return cell | (change or {})


def run(ckpt, cache):
    model, enc = load(ckpt)
    pools = find_words(enc)
    text, _ = read_text(enc)

    def heads():
        return choose_heads(model, enc, pools)

    chosen = cache.run(lambda what: heads(), what="heads") | dict(none=[])
    print(f"14 heads with the largest r: {chosen['lookup']}\n{chosen['r']}", flush=True)

    def measure(what, first=None, tokens=None, **settings):
        """A batch of lists, or the text."""
        began = time.perf_counter()
        change = condition()
        for name in change:
            change[name] = settings.pop(name, change[name])
        name = change.pop("heads")
        set_change(model, chosen[name], **change)
        if what == "text":
            found = dict(losses=text_loss(model, text, tokens))
        else:
            batch = make_batch(enc, pools, range(first, first + BATCH), **settings)
            found = answer(model, batch) if what == "lists" else votes(model, batch)
        return found | dict(seconds=round(time.perf_counter() - began, 2))

    for what, lists, cell in cells():
        began = time.perf_counter()
        if what == "text":
            cache.run(measure, what=what, **cell)
        for first in range(0, lists, BATCH):
            cache.run(measure, what=what, first=first, **cell)
        about = ", ".join(str(value) for value in cell.values())
        print(f"{what}: {about}: {time.perf_counter() - began:.0f} s", flush=True)


# -----------------------------------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m lab.crowd",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ckpt", type=path, default=Path("out/smollm2"), help="(out/smollm2)")
    parser.add_argument("--out", type=path, default=Path("out/crowd"), help="(out/crowd)")
    args = parser.parse_args(argv)
    cache = Cache(args.out / "runs.jsonl")
    run(args.ckpt, cache)


if __name__ == "__main__":
    cli(main)
