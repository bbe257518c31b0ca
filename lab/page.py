"""
Writes docs/index.html, a page on which a reader plays with the look-up of lab/lookup.py.

    python -m lab.page    # trains four small models on one thread: some two minutes

The page is lab/page.html with numbers in it, in one file that needs no server and no network. It
has the logits of the trained layers for a few texts, and makes the maps of them itself, for every
crowd and every lambda. What a whole model answers is in tables, since the models are too large.

A pair's logit depends on its key and its value only, since there are no positions. So two logits
for each pair are enough: with its own value, and with that of the crowd.
"""
import argparse
import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from common import cli, path
from lab.lookup import QUERIES, SHOWN, START_RATE, Reader
from lab.lookup import make_texts, softmax_task, train_reader

N = 64  # pairs
RIGHT = N - QUERIES  # the pair that the first query asks for. The crowd is in the pairs before it
CROWDS = range(RIGHT + 1)
LAMBDAS = [step / 20 for step in range(21)]
CAPS = {"2": 2.0, "none": None}
# what is subtracted: the arm that was trained, and the one as which it is read
MINUS = {
    "average": ("softmax", "softmax minus average"),
    "own": ("softmax", "softmax minus own"),
    "second": ("diff", "diff"),
}
STEPS = 1500
SEED = 3
TEXT_SEED = 4 * 10**6  # of texts that are in no test and that no model was trained on
TEXTS = 128  # for the share of right answers
EXAMPLES = 6  # the first of these texts, which are on the page
TEMPLATE = Path(__file__).with_suffix(".html")
PAGE = Path(__file__).parents[1] / "docs" / "index.html"


def texts_with(m, B=TEXTS):
    """The first B of the same texts for every m, but that m of the pairs share a value."""
    texts = make_texts(torch.Generator().manual_seed(TEXT_SEED), TEXTS, N, m)
    return texts.split(B)[0]


def train_all(steps):
    """{cap: {arm: a trained Reader}}"""
    readers = {}
    for cap, tau in CAPS.items():
        task = replace(softmax_task(tau), steps=steps)
        readers[cap] = {}
        for arm in ("softmax", "diff"):
            lr = SHOWN[arm] if tau == 2.0 else START_RATE
            readers[cap][arm], _ = train_reader(arm, task, lr, SEED)
    return readers


# ---- what the layers and the models give


def logits_of(reader):
    """The logits of the first query, less that of its own token, in EXAMPLES texts.

    Returns {"plain": (EXAMPLES, maps, N), "crowd": (EXAMPLES, maps, RIGHT)}: of each pair with its
    own value, and with the crowd's.
    """
    logits = {}
    for name, m in dict(plain=0, crowd=RIGHT).items():
        texts = texts_with(m, EXAMPLES)
        maps, _, _ = reader.maps(reader.tokens(texts))
        rows = maps[:, :, 0, : N + 1]  # (EXAMPLES, maps, N + 1): the first query sees no other one
        place = texts.rank.argsort(-1).argsort(-1)  # where each pair stands
        row = torch.log(rows / rows[..., N:])
        logits[name] = row.gather(-1, place[:, None].expand(-1, rows.shape[1], -1))
    logits["crowd"] = logits["crowd"][..., :RIGHT]
    return logits


def runs_of(letters):
    """The letters with their counts: rrrc becomes 3r1c."""
    return "".join(f"{len(list(run))}{letter}" for letter, run in groupby(letters))


def answer_tables(trained, arm, B):
    """What a model says, read as another arm, for each lambda and each crowd.

    right and crowd: how many thousandths of all answers are right, and are the crowd's value.
    says: the answer in each example, a letter for each crowd: (r)ight, the (c)rowd's, or (o)ther.
    """
    reader = Reader(arm, trained.task, seed=None)
    reader.load_state_dict(trained.state_dict(), strict=False)  # the lambdas are LAMBDAS
    right = []
    crowd = []
    for m in CROWDS:
        texts = texts_with(m, B)
        said = torch.stack([logits.argmax(-1) for logits in reader.read(texts, LAMBDAS)])
        right.append(said == texts.answer())
        # one pair alone is no crowd
        crowd.append((said == texts.value[:, :1]) & (m > 1))
    right = torch.stack(right, dim=1)  # (LAMBDAS, CROWDS, B, QUERIES)
    crowd = torch.stack(crowd, dim=1)
    says = []
    for example in range(EXAMPLES):
        letters = np.full((len(LAMBDAS), len(CROWDS)), "o")
        letters[crowd[..., example, 0].numpy()] = "c"
        letters[right[..., example, 0].numpy()] = "r"
        says.append([runs_of(row) for row in letters])
    return dict(right=thousandths(right), crowd=thousandths(crowd), says=says)


def thousandths(said):
    return (1000 * said.float().mean((-2, -1))).round().int().tolist()


@torch.no_grad()
def collect(readers, steps, B=TEXTS):
    """All numbers of the page."""
    texts = texts_with(0, EXAMPLES)
    data = dict(steps=steps, seed=SEED, look_ups=B * QUERIES, texts=[], models={})
    for key, value, rank in zip(texts.key, texts.value, texts.rank):
        order = rank.argsort()  # which pair stands at each place
        data["texts"].append(dict(key=key.tolist(), value=value.tolist(), order=order.tolist()))
    for cap, arms in readers.items():
        tables = {}
        for minus, (trained, arm) in MINUS.items():
            tables[minus] = answer_tables(arms[trained], arm, B)
        maps = {}
        for arm, names in dict(softmax=["one"], diff=["first", "second"]).items():
            logits = logits_of(arms[arm])
            for i, name in enumerate(names):
                maps[name] = {which: rounded(row[:, i]) for which, row in logits.items()}
        learned = round(arms["diff"].blocks[0].attn.lambda_full().item(), 3)
        data["models"][cap] = dict(maps=maps, answers=tables, learned=learned)
    return data


def rounded(logits):
    return [[round(number, 4) for number in row] for row in logits.tolist()]


# ---- the first frame, as the script of the page would show it: no crowd, and nothing subtracted


def votes_of(maps, text):
    """The row of one map without a crowd, and the votes (right, crowd, other) for each crowd."""
    plain = torch.tensor(maps["plain"][text], dtype=torch.float64)
    crowd = torch.tensor(maps["crowd"][text], dtype=torch.float64)
    rows = []
    for m in CROWDS:
        powers = torch.cat((crowd[:m], plain[m:])).exp()
        rows.append((powers / (powers.sum() + 1)).tolist())  # the question's own logit is 0
    curve = []
    for m, row in enumerate(rows):
        others = [row[i] for i in range(m, N) if i != RIGHT]
        curve.append((row[RIGHT], sum(row[:m]), max(others)))
    return rows[0], curve


def first_frame(data):
    """{name: what stands for it in the template}"""
    text = data["texts"][0]
    model = data["models"]["2"]
    row, curve = votes_of(model["maps"]["one"], 0)
    right, _, other = curve[0]
    table = model["answers"]["average"]  # whose first row has lambda = 0: nothing is subtracted
    said = {"r": "green", "o": "another colour"}[table["says"][0][0].lstrip("0123456789")[0]]
    voted = "green" if right >= other else "another colour"
    rest = "and so does the whole model" if voted == said else f"but the whole model says {said}"
    look_ups = f"{data['look_ups']:,}"
    frame = {
        "squares": squares(text, row),
        "asked": key_name(text["key"][RIGHT]),
        "right": f"{right:.3f}",
        "other": f"{other:.3f}",
        "verdict": f"The votes say {voted}, {rest}.",
        "share": f"With these settings {table['right'][0][0] / 10:.1f} % of the model’s answers to "
        f"{look_ups} such questions are right.",
        "steps": f"{data['steps']:,}",
        "seed": str(data["seed"]),
        "look-ups": look_ups,
        "data": json.dumps(data, separators=(",", ":")),
    }
    return frame | bars(curve[0]) | chart(curve)


def key_name(key):
    return f"{chr(65 + key // 10)}{key % 10}"


def squares(text, row):
    """The squares in the order of the text, each with its key and the bar of its weight."""
    found = []
    for pair in text["order"]:
        name = key_name(text["key"][pair])
        hue = 164 + 360 * (pair - RIGHT) / N  # 164 is green
        light = 55 + 8 * ((pair + 1) % 3)
        right = ""
        colour = f"colour {text['value'][pair]}"
        if pair == RIGHT:
            right = " right"
            colour = "green"
        found.append(
            f'<button type="button" class="square{right}" tabindex="{-1 if found else 0}" '
            f'style="--hue: {hue}; --light: {light}%" '
            f'aria-label="key {name}, {colour}"><span class="key">{name}</span>'
            f'<span class="weight" style="width: {85 * row[pair] / max(row):.2f}%"></span></button>'
        )
    return "\n".join(found)


def bars(votes):
    """The bars of the votes, none of which is below 0. They begin at 25 %."""
    frame = {}
    for name, vote in zip(("right", "crowd", "other"), votes):
        frame[f"bar-{name}"] = f"left: 25.00%; width: {75 * vote / max(votes):.2f}%"
    return frame


def chart(curve):
    """Two lines, and the border: where the crowd's vote passes the right one's."""
    largest = max(right for right, _, _ in curve)
    high = min(2.2 * largest, 1.1 * max(largest, *(crowd for _, crowd, _ in curve)))
    frame = {"zero": "100.0"}
    for i, name in enumerate(("right", "crowd")):
        points = [f"{10 * m} {100 * (high - vote[i]) / high:.1f}" for m, vote in enumerate(curve)]
        frame[f"line-{name}"] = "M" + "L".join(points)
    border = border_of(curve)
    if border is None:
        frame["border-place"] = "display: none"
        frame["border-said"] = "No crowd of up to 56 passes green."
    else:
        frame["border-place"] = f"left: calc(11px + (100% - 22px) * {border / RIGHT:.4f})"
        frame["border-said"] = f"The border: orange passes green at a crowd of {border:.1f}."
    return frame


def border_of(curve):
    """The crowd whose vote passes the right one, on a line between two sizes, or None."""
    for m in CROWDS[1:]:
        after = curve[m][1] - curve[m][0]
        if after > 0:
            before = max(0, curve[m - 1][0] - curve[m - 1][1])
            return m - 1 + before / (before + after)
    return None


def fill(template, frame):
    for name, text in frame.items():
        assert f"@{name}@" in template, f"{TEMPLATE} has no place for {name}"
        template = template.replace(f"@{name}@", text)
    return template


def make_page(out, steps=STEPS, B=TEXTS):
    """Trains the models and writes the page. Returns the models."""
    readers = train_all(steps)
    frame = first_frame(collect(readers, steps, B))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(fill(TEMPLATE.read_text(encoding="utf-8"), frame), encoding="utf-8")
    return readers


def main(argv=None):
    p = argparse.ArgumentParser(
        prog="python -m lab.page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--out", type=path, default=PAGE, help="file (docs/index.html)")
    args = p.parse_args(argv)
    make_page(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    cli(main)
