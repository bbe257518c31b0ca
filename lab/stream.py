"""
What attention adds to the residual stream, beside the stream that it reads: a figure of start.md.

    python -m lab.stream run        # trains six models, and measures it: 20 minutes on a core
    python -m lab.stream publish    # the page's figure, from its published data in start.json
"""
import torch

from data import load_sequences
from lab import stats
from lab.start import SHOWN, Cell, load_text, train_one
from lab.start_page import COLORS, DRAWN, JSON, STREAM

RATE = 4e-3  # of all six: their own rate
LOOKS = (0, 100, 500)  # steps at which the stream is looked at


@torch.no_grad()
def shares_of(model, idx):
    """For each layer: the size of what attention adds, beside that of the stream that it reads."""
    sizes = []

    def look(block, inputs, output):
        x = inputs[0]
        added = block.attn(block.norm1(x), inputs[1], {})
        sizes.append((added.square().mean().sqrt() / x.square().mean().sqrt()).item())

    hooks = [block.register_forward_hook(look) for block in model.blocks]
    model(idx[:, :-1], idx[:, 1:])
    for hook in hooks:
        hook.remove()
    return sizes


def measure():
    """[{row, std, step, shares}] of six models, seed 3."""
    found = []
    _, val = load_text("manual")
    idx = load_sequences(val, range(16), 256)
    for row in SHOWN:
        for std in DRAWN:
            def look(step, model, row=row, std=std):
                if step in LOOKS:
                    shares = [round(share, 4) for share in shares_of(model, idx)]
                    found.append(dict(row=row, std=std, step=step, shares=shares))
                    print(found[-1], flush=True)

            train_one(Cell(row, "own"), std, RATE, 3, look)
    return found


def draw(found, path):
    """What attention adds, by layer, before the first step and after the last: a panel a start."""
    figure, axes = stats.new_figure(1, 2, width=9, height=5.5)
    for ax, std in zip(axes, DRAWN):
        for look in found:
            if look["std"] == std and look["step"] in (LOOKS[0], LOOKS[-1]):
                is_first = look["step"] == LOOKS[0]
                row = look["row"]
                label = row if is_first else None
                ax.plot(range(1, 5), look["shares"], "-" if is_first else ":", marker="o",
                        color=COLORS[row], linewidth=3, label=label)
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
    STREAM.parent.mkdir(parents=True, exist_ok=True)
    found = measure()
    stats.write_json(STREAM, {}, found)
    draw(found, STREAM.with_suffix(".png"))
    print(f"-> {STREAM.parent}")


def publish():
    draw(stats.read_json(JSON)[0]["stream"], stats.RESULTS / "start-stream.png")


def main(argv=None):
    p = stats.parser("lab.stream", __doc__)
    verbs = dict(run=run, publish=publish)
    p.add_argument("verb", choices=verbs)
    verbs[p.parse_args(argv).verb]()


if __name__ == "__main__":
    main()
