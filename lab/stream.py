"""
What attention adds to the residual stream, beside the stream that it reads: a figure of
start-record.md.

    python -m lab.stream run        # trains six models, and measures it: 20 minutes on a core
    python -m lab.stream publish    # the page's figure, from stream.json in lab/results

`run` writes out/stream/stream.json. To publish it, copy it to lab/results.
"""
from functools import partial
from pathlib import Path

import torch

from data import load_sequences
from lab import stats
from lab.maps import layers
from lab.toys import AS_DRAWN, AT_EACH_RATE, Cell, text_of, train_one

STDS = (AS_DRAWN, 1.0)
RATE = 4e-3  # of all six: their own rate
LOOKS = (0, 100, 500)  # steps at which the stream is looked at


@torch.no_grad()
def shares_of(model, idx):
    """For each layer: the size of what attention adds, beside that of the stream that it reads."""
    shares = []
    for block, x, rope in layers(model, idx):
        added = block.attn(block.norm1(x), rope, {})
        share = added.square().mean().sqrt() / x.square().mean().sqrt()
        shares.append(round(share.item(), 4))
    return shares


def measure():
    """[{row, std, step, shares}] of six models, seed 3."""
    looks = []
    _, val = text_of("manual")
    idx = load_sequences(val, range(16), 256)[:, :-1]

    def look(row, std, step, model):
        if step in LOOKS:
            looks.append(dict(row=row, std=std, step=step, shares=shares_of(model, idx)))
            print(looks[-1], flush=True)

    for row in AT_EACH_RATE:
        for std in STDS:
            train_one(Cell(row, "own"), std, RATE, 3, partial(look, row, std))
    return looks


def draw(looks, path):
    """What attention adds, by layer, before the first step and after the last: a panel a start."""
    figure, axes = stats.new_figure(1, 2, width=9, height=5.5)
    for ax, std in zip(axes, STDS):
        for look in looks:
            if look["std"] == std and look["step"] in (LOOKS[0], LOOKS[-1]):
                is_first = look["step"] == LOOKS[0]
                row = look["row"]
                label = row if is_first else None
                ax.plot(range(1, 5), look["shares"], "-" if is_first else ":", marker="o",
                        color=stats.COLORS[row], linewidth=3, label=label)
        ax.set(yscale="log", ylim=(0.02, 30), title=f"embedding's std {std:g}", xlabel="layer")
        ax.set_xticks(range(1, 5))
        ticks = [3, 10, 30, 100, 300, 1000]
        ax.set_yticks([tick / 100 for tick in ticks], [f"{tick} %" for tick in ticks])
        ax.set_yticks([], minor=True)
    axes[0].set_ylabel("size of what attention adds,\nbeside the stream that it reads")
    title = "solid: at the start\ndotted: after 500 steps"
    axes[1].legend(frameon=False, loc="upper center", title=title)
    axes[1].tick_params(labelleft=False)
    figure.savefig(path)


def run():
    out = Path("out/stream")
    out.mkdir(parents=True, exist_ok=True)
    looks = measure()
    stats.write_json(out / "stream.json", {}, looks)
    draw(looks, out / "start-stream.png")
    print(f"-> {out}")


def publish():
    _, looks = stats.read_json(stats.RESULTS / "stream.json")
    draw(looks, stats.RESULTS / "start-stream.png")


def main(argv=None):
    stats.run_verb("lab.stream", __doc__, argv, run=run, publish=publish)


if __name__ == "__main__":
    main()
