"""
How sharp are a pretrained model's look-up heads? A list is read, and a word of it asked for.

    Water: house   Music: table   ...   Music: table   Water:   -> house

A list has 32 lines, an empty one, three of the lines again, and a name with a colon. In a crowd of
m, m wrong lines share one word. The gap of a head is by how much the logit of the right word's
place exceeds that of a wrong one: of the right place less the log of the mean exp of the others.
Then m wrong places together have less weight than the right one as long as m < e^gap.

    python -m lab.lists run       # out/lists.jsonl: the gaps of SmolLM2, and what its crowds do
    python -m lab.lists keep      # and what a line's weight becomes if others repeat its word
    python -m lab.lists tables    # what the published ones say, or a file that is named behind
"""
import random
import re
from pathlib import Path

import numpy as np
import torch

from lab.maps import layers, tokenizer_of
from lab.stats import RESULTS, add_run, markdown, one_line, parser, read_runs
from model import GPT, softmax_map
from sample import newest_checkpoint

RUNS = RESULTS / "gaps.jsonl"  # the published ones, a line for each crowd
OUT = Path("out/lists.jsonl")
LINES = 32  # of a list
KEEP_LISTS = range(20, 120)
LISTS = range(20, 220)  # the first 20 were looked at before the predictions
CROWDS = (0, 4, 8, 16, 24)
AT_ONCE = 10  # lists that are read together
# (layer, head) of SmolLM2 in which the last token of a list gives most to the right word, of 270.
# They were chosen on 30 other lists
LOOK_UP = [(18, 6), (18, 7), (17, 3), (24, 4), (23, 2), (22, 7), (17, 4), (23, 8), (17, 5), (21, 8),
           (23, 7), (20, 6), (23, 1), (23, 0)]


def load_smollm2():
    """(model, tokenizer), as lab.hf has written them."""
    file = newest_checkpoint(Path("out/smollm2"))
    model, extra = GPT.load(file)
    return model, tokenizer_of(file, extra)


def find_words(tokenizer):
    """Names like "Water" and words like "house", of which each is one token."""
    letters = tokenizer.get_vocab()  # in which a blank is written Ġ
    words = [token[1:] for token in sorted(letters) if re.fullmatch("Ġ[a-z]{4,10}", token)]
    words = [word for word in words if word.capitalize() in letters]
    random.Random("names and words").shuffle(words)
    half = len(words) // 2
    return [word.capitalize() for word in words[:half]], words[half:]


def make_list(pools, number, crowd):
    """(text, the words of its lines, the line that is asked for).

    Lists of one number differ in the crowd alone.
    """
    rng = random.Random(f"whose average {number}")
    names = rng.sample(pools[0], LINES)
    words = rng.sample(pools[1], LINES)
    right, *others = rng.sample(range(LINES), LINES)
    for line in others[:crowd]:
        words[line] = words[others[0]]
    lines = [f"{name}: {word}" for name, word in zip(names, words)]
    examples = [lines[i] for i in others[-3:]]  # never of the crowd
    return "\n".join([*lines, "", *examples, f"{names[right]}:"]), words, right


def read_lists(tokenizer, crowd, numbers):
    """Batches of lists: (tokens (B, T), the ids of the words of each line (B, 32), right (B,))."""
    pools = find_words(tokenizer)
    for first in range(0, len(numbers), AT_ONCE):
        lists = [make_list(pools, i, crowd) for i in numbers[first : first + AT_ONCE]]
        texts, words, right = zip(*lists)
        tokens = torch.tensor([tokenizer.encode(text) for text in texts])  # all have one length
        ids = tokens[:, 2 : 4 * LINES : 4]  # a line is a name, a colon, a word, a new line
        assert tokenizer.decode(ids[0]).split() == words[0]
        yield tokens, ids, torch.tensor(right)


@torch.inference_mode()
def answers(model, tokenizer, crowd, numbers):
    """By list: log p of the right word, and which word is likeliest: right, crowd or other."""
    found = dict(logp=[], says=[])
    for tokens, ids, right in read_lists(tokenizer, crowd, numbers):
        logp = model(tokens)[0][:, -1].log_softmax(-1)
        for row, words, line in zip(logp, ids, right):
            found["logp"].append(round(row[words[line]].item(), 4))
            best = row.argmax()
            if best == words[line]:
                found["says"].append("right")
            else:
                found["says"].append("crowd" if (words == best).sum() > 1 else "other")
    return found


@torch.inference_mode()
def weights(model, tokens):
    """What the last token gives to the word of each line, in the look-up heads: (B, 14, 32)."""
    found = {}
    for layer, (attn, x, rope) in enumerate(layers(model, tokens)):
        heads = [head for where, head in LOOK_UP if where == layer]
        if heads:
            q, k, _ = attn.project(x)
            A = softmax_map(q[:, heads], k[:, heads], rope)  # (B, heads, T, T)
            for head, row in zip(heads, A[:, :, -1].unbind(1)):
                found[layer, head] = row[:, 2 : 4 * LINES : 4]
        if len(found) == len(LOOK_UP):
            break  # the later layers have none
    return torch.stack([found[place] for place in LOOK_UP], dim=1)


def measure(model, tokenizer, crowd, numbers):
    """(A (lists, 14, 32), where the right word is (lists, 1, 32), and where the crowd is)."""
    tokens, ids, right = map(torch.cat, zip(*read_lists(tokenizer, crowd, numbers)))
    A = torch.cat([weights(model, part) for part in tokens.split(AT_ONCE)])
    is_right = torch.arange(LINES) == right[:, None]
    is_crowd = (ids[:, :, None] == ids[:, None]).sum(-1) > 1
    return A, is_right[:, None], is_crowd[:, None]


def by_head(x):
    """(lists, 14) as lists of plain numbers, a list for each head."""
    return [[float(f"{value:.3g}") for value in head] for head in x.T.tolist()]


def run():
    """Begins OUT with a line for each crowd: by list what the model says, and by head and list

        gap      the gap
        right    the weight of the right word's place
        crowd    the weight of the crowd's places
        places   the weight that these places have in the list without a crowd
    """
    model, tokenizer = load_smollm2()
    OUT.unlink(missing_ok=True)
    for m in CROWDS:
        A, is_right, is_crowd = measure(model, tokenizer, m, LISTS)
        if m == 0:
            without = A
        right = (A * is_right).sum(-1)
        others = (A * ~is_right).sum(-1) / (LINES - 1)
        row = dict(m=m) | answers(model, tokenizer, m, LISTS)
        row["gap"] = by_head(right.log() - others.log())
        row["right"] = by_head(right)
        row["crowd"] = by_head((A * is_crowd).sum(-1))
        row["places"] = by_head((without * is_crowd).sum(-1))
        add_run(OUT, row)
        print(f"crowd of {m} -> {OUT}", flush=True)


def keep():
    """Adds to OUT what each kind of line keeps of its weight beside a crowd of 16.

    The kinds are the crowd's first line, its second one, its later ones, the other wrong ones, and
    the right one. By list, summed over the heads: [with the crowd, without it].
    """
    model, tokenizer = load_smollm2()
    without = measure(model, tokenizer, 0, KEEP_LISTS)[0]
    row = dict(kept=kept(without, *measure(model, tokenizer, 16, KEEP_LISTS)))
    add_run(OUT, row)


def kept(without, A, is_right, is_crowd):
    rank = is_crowd.cumsum(-1) * is_crowd  # 1 at the crowd's first line, 0 elsewhere
    kinds = {"the crowd's first line": rank == 1, "its second line": rank == 2,
             "its later lines": rank > 2, "other wrong lines": ~is_crowd & ~is_right,
             "the right line": is_right}
    found = {}
    for name, where in kinds.items():
        sums = torch.stack([(weight * where).sum((1, 2)) for weight in (A, without)], dim=-1)
        found[name] = [[round(x, 4) for x in pair] for pair in sums.tolist()]
    return found


# ---- what was found

def law_table(rows):
    """Of all pairs of head and list: how often the crowd wins, where e^gap is below m, and not."""
    gap = np.array(rows[0]["gap"])  # (14, lists)
    lines = []
    for m in CROWDS[1:]:
        wins = np.greater(rows[m]["crowd"], rows[m]["right"])
        below = np.exp(gap) < m
        places = np.greater(rows[m]["places"], rows[0]["right"])
        lines.append({
            "crowd": m, "e^gap below it, %": f"{100 * below.mean():.0f}",
            "crowd wins there, %": interval(wins, below), "elsewhere, %": interval(wins, ~below),
            "its places win there if their words differ, %": interval(places, below),
            "a line of it weighs, another one = 1": f"{line_weight(rows[m], m):.2f}",
        })
    return markdown(lines)


def line_weight(row, m):
    """The weight of a crowd's line where another wrong one has 1, median over heads and lists."""
    crowd = np.array(row["crowd"])
    others = np.array(row["right"]) / np.exp(row["gap"]) * (LINES - 1) - crowd
    return np.median((crowd / m) / (others / (LINES - 1 - m)))


def interval(wins, where):
    """Like "40 (35 to 45)", in %, by a bootstrap over lists. wins, where: (heads, lists)"""
    chosen = np.random.default_rng(0).integers(wins.shape[1], size=(2000, wins.shape[1]))
    number = (wins & where).sum(0)[chosen].sum(1)  # (2000,)
    shares = 100 * number / where.sum(0)[chosen].sum(1)
    low, high = np.percentile(shares, [2.5, 97.5])
    return f"{100 * wins[where].mean():.0f} ({low:.0f} to {high:.0f})"


def kept_table(kept):
    """What each kind of line keeps, with an interval by a bootstrap over lists."""
    lines = []
    for name, sums in kept.items():
        sums = np.array(sums)  # (lists, 2)
        chosen = np.random.default_rng(0).integers(len(sums), size=(2000, len(sums)))
        total = sums[chosen].sum(1)
        low, high = np.percentile(total[:, 0] / total[:, 1], [2.5, 97.5])
        mean = sums[:, 0].sum() / sums[:, 1].sum()
        weight = f"{mean:.2f} ({low:.2f} to {high:.2f})"
        lines.append({"line": name, "weight, without a crowd = 1": weight})
    return markdown(lines)


def answer_table(rows):
    """What the whole model says."""
    lines = []
    for m, row in rows.items():
        line = {"crowd": m}
        for word in ("right", "crowd", "other"):
            line[f"{word}, %"] = f"{100 * np.mean([said == word for said in row['says']]):.1f}"
        lines.append(line | {"log p of the right word": f"{np.mean(row['logp']):.2f}"})
    return markdown(lines)


def rows_by_crowd(file=RUNS):
    return {row["m"]: row for row in read_runs(file) if "m" in row}


def tables(file):
    rows = rows_by_crowd(file)
    print(law_table(rows), answer_table(rows), sep="\n\n", end="\n\n")
    print(*[kept_table(row["kept"]) for row in read_runs(file) if "kept" in row])


def main(argv=None):
    p = parser("lab.lists", __doc__)
    p.add_argument("verb", choices=("run", "keep", "tables"))
    p.add_argument("file", nargs="?", default=RUNS, help="for tables")
    args = p.parse_args(argv)
    if args.verb == "tables":
        tables(args.file)
    else:
        dict(run=run, keep=keep)[args.verb]()


if __name__ == "__main__":
    with one_line():
        main()
