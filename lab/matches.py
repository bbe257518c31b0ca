"""
Where in the text is diff_v2 ahead? The table of matches in lab/results/minus.md.

    python -m lab.matches publish                # the page's table, from matches.json
    python -m lab.matches measure out/matches    # of these runs of yours, into their folder:

    train() { python train.py --device=cpu --dtype=float32 "$@"; }
    for s in 8 9 10 11 12 13 14 15 16 17; do
        out=out/matches/$s
        train --attn=softmax --lr=4e-3 --seed=$s --out=$out
        train --attn=diff_v2 --lr=2e-3 --seed=$s --out=$out
        train --attn=softmax --lr=4e-3 --seed=$s --steps=545 --out=$out/longer
    done

A byte of the val text is predicted from those before it in its block. Its match is the longest run
of bytes just before it that also stands earlier in the block. The byte that followed there is what
the match predicts.

If differential attention cancels noise, its lead should lie where a long match predicts another
byte than the one that comes. The control is softmax after 9 % more steps: a better model, without a
minus. The intervals are by a bootstrap over seeds and over blocks of the text.
"""
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from data import load_manual, load_sequences
from lab.stats import RESULTS, markdown, parser, renew
from model import GPT

MATCHES_JSON = RESULTS / "matches.json"
PAIRS = {"diff_v2": ("diff_v2", "softmax"), "longer": ("longer/softmax", "softmax")}
COLUMNS = {"diff_v2": "of the lead of `diff_v2`, %", "longer": "of that of a longer softmax, %"}
T = 256  # bytes of a block, as train.py evaluates them


@torch.no_grad()
def byte_losses(model, sequences):
    """The loss of each target in nats, (blocks, T)."""
    losses = []
    for tokens in sequences.split(16):
        logits, _ = model(tokens[:, :-1], tokens[:, 1:])
        losses.append(F.cross_entropy(logits.mT, tokens[:, 1:], reduction="none"))
    return torch.cat(losses).numpy()


def match_of(tokens, i):
    """(length, next byte) of the longest match of tokens[: i + 1]: the latest, if several."""
    best = 0
    following = -1
    for j in range(i):  # a match that ends at j
        if tokens[j] != tokens[i]:
            continue
        length = 1
        while j - length >= 0 and tokens[j - length] == tokens[i - length]:
            length += 1
        if length >= best:
            best = length
            following = tokens[j + 1]
    return best, following


def name_of(length, is_right):
    """The class of a byte whose match has this length, and predicts it rightly or wrongly."""
    if length <= 3:
        return "0 to 3"
    name = "4 to 7" if length <= 7 else "8 and more"
    return f"{name}, {'right' if is_right else 'wrong'}"


def classes_of(sequences):
    """For each target the name of its class, (blocks, T)."""
    names = np.empty((len(sequences), sequences.shape[1] - 1), dtype=object)
    for row, tokens in enumerate(sequences.tolist()):
        for i in range(len(tokens) - 1):
            length, following = match_of(tokens, i)
            names[row, i] = name_of(length, following == tokens[i + 1])
    return names


def measure(folder):
    """{names, counts, leads}: of each class and block, summed over bytes. Leads are by seed."""
    paths = sorted(file.parents[1] for file in folder.glob("*/diff_v2/ckpt.pt"))
    if not paths:
        raise SystemExit(f"there is no */diff_v2/ckpt.pt below {folder}")
    val = load_manual()[1]
    sequences = load_sequences(val, range((len(val) - 1) // T), T)
    classes = classes_of(sequences)
    names = sorted(set(classes.flatten()))
    masks = np.stack([classes == name for name in names])  # (classes, blocks, T)
    leads = {name: [] for name in PAIRS}
    for path in paths:
        for name, (run, base) in PAIRS.items():
            losses = byte_losses(GPT.load(path / run / "ckpt.pt"), sequences)
            base_losses = byte_losses(GPT.load(path / base / "ckpt.pt"), sequences)
            less = losses - base_losses  # negative: it is ahead of softmax
            leads[name].append((less * masks).sum(2).round(4).tolist())  # (classes, blocks)
            print(f"{path.name}: {name} - softmax {less.mean():+.4f}", flush=True)
    return dict(names=names, counts=masks.sum(2).tolist(), leads=leads)


def shares_of(leads, resamples=4000):
    """[(share of the lead, least, most)] of each class, with the interval by a bootstrap.

    leads: (seeds, classes, blocks), of which each is the sum over a block's bytes in a class.
    """
    seeds, _, blocks = leads.shape
    random = np.random.default_rng(0)
    resampled = []
    for number in range(resamples + 1):
        of_seeds = np.arange(seeds)
        of_blocks = np.arange(blocks)
        if number > 0:  # the first one is the whole
            of_seeds = random.integers(seeds, size=seeds)
            of_blocks = random.integers(blocks, size=blocks)
        lead = leads[of_seeds][:, :, of_blocks].sum(2).mean(0)  # (classes,)
        resampled.append(lead / lead.sum())
    least, most = np.percentile(resampled[1:], [2.5, 97.5], axis=0)
    return list(zip(resampled[0], least, most))


def table_of_matches(matches, resamples=4000):
    """A line for each class: its share of the bytes, and of the leads on softmax."""
    counts = np.array(matches["counts"]).sum(1)  # of each class
    table = []
    for name, share in zip(matches["names"], counts / counts.sum()):
        table.append({"longest earlier match": name, "of all bytes, %": f"{100 * share:.1f}"})
    for which, title in COLUMNS.items():
        shares = shares_of(np.array(matches["leads"][which]), resamples)
        for line, share in zip(table, shares):
            percent, least, most = (f"{100 * x:.0f}" for x in share)
            line[title] = f"{percent} ({least} to {most})"
    return table


def publish():
    matches = json.loads(MATCHES_JSON.read_text())
    renew(RESULTS / "minus.md", {"matches": markdown(table_of_matches(matches))})


def write_matches(folder):
    matches = measure(folder)
    (folder / "matches.json").write_text(json.dumps(matches))
    print(markdown(table_of_matches(matches)))


def main(argv=None):
    p = parser("lab.matches", __doc__)
    verbs = p.add_subparsers(dest="verb", required=True)
    verbs.add_parser("publish")
    verbs.add_parser("measure").add_argument("folder", type=Path)
    args = p.parse_args(argv)
    if args.verb == "publish":
        publish()
    else:
        write_matches(args.folder)


if __name__ == "__main__":
    main()
