"""
Writes the numbers of docs/index.html, a page on which a reader plays with the look-up of the lab.

    python -m docs.page    # trains six small models on one thread: some six minutes

The page is one file, which needs no server and no network. All but its numbers is written by hand
there. Its models are the three of `python -m lab.lookup`, and the same without a cap. It has the logits of the
trained layers for a few texts, and makes the maps of them itself, for every crowd and every lambda.
What a whole model answers is in tables, since the models are too large.

A pair's logit depends on its key and its value only, since there are no positions. So two logits
for each pair are enough: with its own value, and with that of the crowd.
"""
import json
import re
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from lab.lookup import shown_models
from lab.pairs import QUERIES, RIGHT, STEPS, Texts, shown_texts
from lab.stats import one_line, parser
from model import make_rope, softmax_map

CROWDS = range(RIGHT + 1)
LAMBDAS = [step / 10 for step in range(11)]  # and what a model has learned
CAPS = {"2": 2.0, "none": None}
# what is subtracted: the model whose map it is, and as what it is read
MINUS = {
    "average": ("softmax_average", "softmax_average"),
    "own": ("softmax", "softmax_own"),
    "second": ("diff", "diff"),
}
EXAMPLES = 6  # the first of the texts, which are on the page
PAGE = Path(__file__).with_name("index.html")
DATA = re.compile(r'(?<=<script type="application/json" id="data">).*(?=</script>)')


def first_texts(m, B):
    """The first B of the texts that all pictures show."""
    return Texts(*(part[:B] for part in shown_texts(m)))


@torch.no_grad()
def logits_of(reader):
    """The logits of the first query, less that of its own token, in EXAMPLES texts.

    A list for each map of {"plain": (EXAMPLES, 64), "crowd": (EXAMPLES, RIGHT)}: of each pair with
    its own value, and with the crowd's.
    """
    layer = reader.blocks[0].attn
    found = {}
    for name, m in dict(plain=0, crowd=RIGHT).items():
        texts = first_texts(m, EXAMPLES)
        x = reader.blocks[0].norm1(reader.tokens(texts))
        q, k, _ = layer.project(x)
        maps = softmax_map(q, k, make_rope(reader.config, x.shape[1], x.device, x.dtype))
        row = maps[:, :, -QUERIES, : 64 + 1].log()  # the first query sees 64 pairs and itself
        row = row[..., :-1] - row[..., -1:]
        found[name] = row.gather(-1, texts.place()[:, None].expand(-1, row.shape[1], -1))
    found["crowd"] = found["crowd"][..., :RIGHT]
    lists = []
    for plain, crowd in zip(found["plain"].unbind(1), found["crowd"].unbind(1)):
        lists.append(dict(plain=rounded(plain), crowd=rounded(crowd)))
    return lists


def rounded(logits):
    """As lists, with four digits behind the point."""
    return np.round(logits.double().numpy(), 4).tolist()


@torch.no_grad()
def answer_tables(reader, arm, lambdas, B):
    """What a model says, read as this arm, for each lambda and each crowd.

    right and crowd: how many thousandths of all answers are right, and are the crowd's value.
    says: the answer in each example, a letter for each crowd: (r)ight, the (c)rowd's, or (o)ther.
    """
    tables = dict(right=[], crowd=[], says=[[] for _ in range(EXAMPLES)])
    for lam in lambdas:
        held = reader.read_as(arm, lam)
        rows = dict(right=[], crowd=[])
        letters = np.full((EXAMPLES, len(CROWDS)), "o")
        for m in CROWDS:
            texts = first_texts(m, B)
            said = held(texts).argmax(-1)  # (B, QUERIES)
            right = said == texts.answer()
            crowd = (said == texts.value[:, :1]) & (m > 0)
            rows["right"].append(round(1000 * right.float().mean().item()))
            rows["crowd"].append(round(1000 * crowd.float().mean().item()))
            letters[crowd[:EXAMPLES, 0].numpy(), m] = "c"
            letters[right[:EXAMPLES, 0].numpy(), m] = "r"
        for name, row in rows.items():
            tables[name].append(row)
        for example, row in enumerate(letters):
            tables["says"][example].append(runs_of(row))
    return tables


def runs_of(letters):
    """The letters with their counts: rrrc becomes 3r1c."""
    return "".join(f"{len(list(run))}{letter}" for letter, run in groupby(letters))


def collect(steps, B):
    """All numbers of the page. B: how many texts the shares are of."""
    texts = first_texts(0, EXAMPLES)
    data = dict(steps=steps, look_ups=B * QUERIES, texts=[], models={})
    for key, value, order in zip(texts.key, texts.value, texts.order()):
        data["texts"].append(dict(key=key.tolist(), value=value.tolist(), order=order.tolist()))
    for cap, tau in CAPS.items():
        readers = shown_models(tau, steps)
        model = dict(maps={}, lambdas={}, learned={}, answers={})
        for arm, names in (
            ("softmax", ["one"]), ("softmax_average", ["average"]), ("diff", ["first", "second"]),
        ):
            model["maps"] |= zip(names, logits_of(readers[arm]))
        for minus, (trained, arm) in MINUS.items():
            lambdas = LAMBDAS
            if minus != "own":  # with which nothing was trained
                model["learned"][minus] = round(readers[trained].own_lambda(), 3)
                lambdas = sorted({*LAMBDAS, model["learned"][minus]})
            model["lambdas"][minus] = lambdas
            model["answers"][minus] = answer_tables(readers[trained], arm, lambdas, B)
        data["models"][cap] = model
    return data


def fill(data):
    """The page with these numbers."""
    numbers = json.dumps(data, separators=(",", ":"))
    return DATA.sub(lambda _: numbers, PAGE.read_text(encoding="utf-8"))


def main(argv=None):
    parser("docs.page", __doc__).parse_args(argv)
    PAGE.write_text(fill(collect(STEPS, B=128)), encoding="utf-8")
    print(f"-> {PAGE}")


if __name__ == "__main__":
    with one_line():
        main()
