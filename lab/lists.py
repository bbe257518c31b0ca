"""
How sharp are a pretrained model's look-up heads? A list is read, and a word of it asked for.

    Water: house   Music: table   ...   Music: table   Water:   -> house

A list has 32 lines, an empty one, three of the lines again, and a name with a colon. In a crowd of
m, m wrong lines share one word. The gap of a head is by how much the logit of the right word's
place exceeds that of a wrong one: of the right place less the log of the mean exp of the others.
Then m wrong places together have less weight than the right one as long as m < e^gap.

    python -m lab.lists    # the gaps of SmolLM2 and what its crowds do: some ten minutes
"""
import json
import random
import re
from pathlib import Path

import torch

from lab.checkpoints import load_checkpoint, load_tokenizer
from lab.maps import layers
from lab.stats import RESULTS
from model import make_rope, softmax_map

LINES = 32  # of a list
LISTS = 300
CROWDS = (0, 4, 8, 16, 24)
AT_ONCE = 10  # lists that are read together
# (layer, head) of SmolLM2 in which the last token of a list gives most to the right word, of 270.
# They were chosen on 30 other lists
LOOK_UP = [(18, 6), (18, 7), (17, 3), (24, 4), (23, 2), (22, 7), (17, 4), (23, 8), (17, 5), (21, 8),
           (23, 7), (20, 6), (23, 1), (23, 0)]


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


def read_lists(tokenizer, crowd, n):
    """Batches of n lists: (tokens (B, T), the ids of the words of each line (B, 32), right (B,))."""
    pools = find_words(tokenizer)
    for first in range(0, n, AT_ONCE):
        texts, words, right = zip(*[make_list(pools, i, crowd) for i in range(first, first + AT_ONCE)])
        tokens = torch.tensor([tokenizer.encode(text) for text in texts])  # all have one length
        ids = tokens[:, 2 : 4 * LINES : 4]  # a line is a name, a colon, a word, a new line
        assert tokenizer.decode(ids[0]).split() == words[0]
        yield tokens, ids, torch.tensor(right)


@torch.inference_mode()
def answers(model, tokenizer, crowd, n):
    """By list: the log-probability of the right word, and the word that is likeliest: "right",
    "crowd" or "other"."""
    found = dict(logp=[], says=[])
    for tokens, ids, right in read_lists(tokenizer, crowd, n):
        logp = model(tokens)[0][:, -1].log_softmax(-1)
        for row, words, line in zip(logp, ids, right):
            is_many = [(words == word).sum() > 1 for word in words]
            best = row.argmax()
            found["logp"].append(round(row[words[line]].item(), 4))
            is_crowd = any(many and word == best for many, word in zip(is_many, words))
            found["says"].append("right" if best == words[line] else "crowd" if is_crowd else "other")
    return found


@torch.inference_mode()
def weights(model, tokens, ids):
    """What the last token gives to the word of each line, in the look-up heads: (B, 14, 32)."""
    found = {}
    for layer, (block, x, rope) in enumerate(layers(model, tokens)):
        heads = [head for where, head in LOOK_UP if where == layer]
        if heads:
            q, k, _ = block.attn.project(block.norm1(x))
            A = softmax_map(q[:, heads], k[:, heads], rope)  # (B, heads, T, T)
            for head, row in zip(heads, A[:, :, -1].unbind(1)):
                found[layer, head] = row[:, 2 : 4 * LINES : 4]
    return torch.stack([found[place] for place in LOOK_UP], dim=1)


def measure(model, tokenizer, crowd, n):
    """A row: by head and list, the weights of the right word, of the crowd, of the heaviest other
    word, and the gap. All but the gap are in thousandths."""
    rows = []
    for tokens, ids, right in read_lists(tokenizer, crowd, n):
        A = weights(model, tokens, ids)  # (B, 14, 32)
        is_right = torch.arange(LINES) == right[:, None]  # (B, 32)
        stands = (ids[:, :, None] == ids[:, None]).sum(-1)  # how often each word stands
        of_right = A[is_right[:, None].expand_as(A)].unflatten(0, A.shape[:2])
        others = A.masked_fill(is_right[:, None], 0)
        of_crowd = (others * (stands > 1)[:, None]).sum(-1)
        of_other = (others * (stands == 1)[:, None]).amax(-1)
        gap = of_right.log() - (others.sum(-1) / (LINES - 1)).log()
        rows.append(torch.stack((1000 * of_right, 1000 * of_crowd, 1000 * of_other, gap)))
    rows = torch.cat(rows, dim=1).transpose(1, 2)  # (4, 14, n)
    names = ("right", "crowd", "other", "gap")
    return {name: [[round(x, 2) for x in head] for head in row.tolist()]
            for name, row in zip(names, rows)}


def main():
    file, model = load_checkpoint(Path("out/smollm2"))
    tokenizer = load_tokenizer(file, model)
    out = RESULTS / "lists.jsonl"
    done = [json.loads(line)["crowd"] for line in out.read_text().splitlines()] if out.exists() else []
    for crowd in CROWDS:
        if crowd not in done:
            row = dict(crowd=crowd) | answers(model, tokenizer, crowd, LISTS)
            row |= measure(model, tokenizer, crowd, LISTS)
            with open(out, "a", encoding="utf-8") as f:
                f.write(json.dumps(row) + "\n")
            print(f"crowd of {crowd} -> {out}", flush=True)


if __name__ == "__main__":
    main()
