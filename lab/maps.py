"""
What a trained model attends to: the map of every head, for a text.

    python -m lab.maps --ckpt=out/toy/diff --text "to be or not to be"

It draws out/maps/maps.png, with a row of panels for each layer and a panel for each head (Figure 1
of the paper shows such maps). A map is what is left after the subtraction, so it can be negative.
Row i of it is what token i takes from each token j <= i.
"""
from pathlib import Path

import numpy as np
import torch

import lab.arms  # noqa: F401, it adds its classes to model.ATTENTION
from cli import use_module
from data import get_tokenizer
from lab.stats import new_figure, one_line, parser
from model import GPT, Refused, make_rope
from sample import newest_checkpoint

LONGEST = 64  # tokens. In a map of more the labels can't be read


def layers(model, idx):
    """(attention, x, rope) of each layer for the tokens idx (B, T). x: what the attention reads."""
    x = model.wte(idx)
    rope = make_rope(model.config, idx.shape[1], idx.device, x.dtype)
    for block in model.blocks:
        yield block.attn, block.norm1(x), rope
        x = block(x, rope)


@torch.no_grad()
def attention_maps(model, idx):
    """[(map, lambda)] of the layers for the tokens idx (B, T). A map is (h, T, T), of idx[0].

    lambda is its mean over heads and tokens, and None where a layer has none.
    """
    found = []
    for attn, x, _ in layers(model, idx):
        lam = None
        if hasattr(attn, "lam"):
            lam = torch.as_tensor(attn.lam(x)).float().mean().item()
        found.append((attn.map(x)[0], lam))
    return found


def draw(maps, tokens):
    """A figure of the maps, as attention_maps gives them. tokens: the text of each token."""
    heads = len(maps[0][0])
    width = 3 * heads + 1.5
    figure, axes = new_figure(len(maps), heads, width=width, height=3 * len(maps) + 1)
    letters = 11  # in points, where a panel is 3 inches wide
    T = len(tokens)
    future = np.triu(np.ones((T, T), bool), 1)
    entries = torch.cat([A[:, 1:, 1:].flatten() for A, _ in maps]).abs()
    # the first token often has most of the weight, which would leave no colour for the rest
    largest = entries[entries > 0].quantile(0.97).item()
    labels = [readable(token) for token in tokens]
    size = min(letters, 170 / T)
    upright = 0 if max(map(len, labels)) == 1 else 90
    for i, ax in enumerate(axes):
        layer, head = divmod(i, heads)
        A, lam = maps[layer]
        shown = np.ma.masked_where(future, A[head].numpy())
        image = ax.imshow(shown, cmap="PuOr_r", vmin=-largest, vmax=largest)
        title = f"layer {layer}, head {head}"
        if lam is not None:
            title += f", λ = {lam:.2f}"
        ax.set_title(title, fontsize=letters)
        ax.grid(False)
        ax.tick_params(length=0)
        ax.set_xticks(range(T), labels, fontsize=size, rotation=upright)
        ax.set_yticks(range(T), labels, fontsize=size)
    figure.supylabel("token i takes", fontsize=letters)
    figure.supxlabel("from token j", fontsize=letters)
    bar = figure.colorbar(image, ax=list(axes), shrink=0.5, extend="both", pad=0.02)
    bar.ax.tick_params(labelsize=letters)
    for _ in range(2):  # square panels move when they get their size, so that one pass is too few
        figure.draw_without_rendering()
    return figure


def readable(token):
    """A token as a label: a blank and a new line are seen, and a $ does not begin a formula."""
    return token.replace(" ", "␣").replace("\n", "↵").replace("$", r"\$")


def tokenizer_of(file, extra):
    """The tokenizer of a checkpoint: one of data.py, or one that lab/hf.py has left beside it."""
    if "tokenizer" in extra:
        return get_tokenizer(extra["tokenizer"])
    if not (file.parent / "tokenizer.json").exists():
        raise Refused(f"{file} does not name its tokenizer, and none lies beside it")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(file.parent)


def main(argv=None):
    p = parser("lab.maps", __doc__)
    p.add_argument("--ckpt", type=Path, default="out", help="file, or folder: its newest one (out)")
    p.add_argument("--use", help="module with the attention, if it is your own, like myarm")
    p.add_argument("--text", default="to be or not to be", help="what the model reads")
    p.add_argument("--out", type=Path, default="out/maps", help="folder (out/maps)")
    args = p.parse_args(argv)
    if args.use:
        use_module(args.use)
    file = newest_checkpoint(args.ckpt)
    model, extra = GPT.load(file)
    tokenizer = tokenizer_of(file, extra)
    tokens = tokenizer.encode(args.text)
    if not 2 <= len(tokens) <= LONGEST:
        raise Refused(f"--text has {len(tokens)} tokens. A map of 2 to {LONGEST} can be read")
    figure = draw(attention_maps(model, torch.tensor([tokens])),
                  [tokenizer.decode([token]) for token in tokens])
    out = args.out.expanduser()
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "maps.png")
    print(f"-> {out / 'maps.png'}, from {file}")


if __name__ == "__main__":
    with one_line():
        main()
