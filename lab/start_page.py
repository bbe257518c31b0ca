"""
The tables and the figures of lab/results/start.md, from lab/results/start.json.

    python -m lab.start_page           # writes them
    python -m lab.start_page collect   # puts the runs of out/start into start.json before
    python -m lab.start_page stream    # trains six models, and measures what attention adds:
                                       # 20 minutes on a core
"""
import json
from dataclasses import replace
from statistics import fmean

import torch

import train
from lab import stats
from lab.start import CHOOSE_ON, FEW, OUT, RATES, RESULTS, ROWS, SHOWN, Cell, load_text

STD = {"1": 1.0, "0.05": None}
# the contrasts: a row less another one
CONTRASTS = {
    "(a) diff − softmax": ("diff", "softmax"),
    "(b) diff − softmax, norm": ("diff", "softmax, norm"),
    "(c) diff − 2 heads, norm, factor": ("diff", "2 heads, norm, factor"),
    "(d) diff, no norm − 2 heads": ("diff, no norm", "2 heads"),
    "softmax, norm − softmax": ("softmax, norm", "softmax"),
}
LOOKS = (0, 100, 500)  # steps at which the stream is looked at
COLORS = {"softmax": "#0072B2", "softmax, norm": "#009E73", "diff": "#D55E00"}
NAMES = {"softmax": "softmax", "softmax, norm": "softmax with diff's norm", "diff": "diff"}


class Data:
    """The runs of start.json."""

    def __init__(self, runs):
        self.runs = runs

    def losses(self, row, std, head="own", text="manual", steps=500, size="0.8 M", lr=None,
               seeds=None):
        """{seed: val loss} at one rate, by default the cell's own."""
        cell = dict(row=row, std=std, head=head, text=text, steps=steps, size=size)
        runs = [run for run in self.runs if cell.items() <= run.items()]
        if not runs:
            return {}
        if lr is None:
            lr = self.best_rate(runs)
        return {run["seed"]: run["val_loss"] for run in runs if run["lr"] == lr
                and (run["seed"] not in CHOOSE_ON if seeds is None else run["seed"] in seeds)}

    def best_rate(self, runs):
        """The rate that was chosen: on seeds 1 and 2, or those of them that a cell has."""
        tried = {}
        for run in runs:
            if run["seed"] in CHOOSE_ON or 48 <= run["seed"] < 56:
                tried.setdefault(run["lr"], []).append(run["val_loss"])
        return min(tried, key=lambda lr: fmean(tried[lr]))

    def rate_of(self, row, std, **cell):
        usual = dict(head="own", text="manual", steps=500, size="0.8 M")
        wanted = dict(row=row, std=std) | usual | cell
        return self.best_rate([run for run in self.runs if wanted.items() <= run.items()])


def difference(a, b, digits=3):
    """Of two {seed: loss}, like "0.016 ± 0.010"."""
    return stats.plus_minus(*stats.difference(list(a.values()), list(b.values())), digits)


def arms_table(data):
    """A line for each arm that was measured: its loss, and its loss less softmax's."""
    table = []
    for row in ROWS:
        line = {"arm": row}
        for name, std in STD.items():
            found = data.losses(row, std)
            line[f"s = {name}"] = line[f"less softmax, s = {name}"] = ""
            line[f"rate, n, s = {name}"] = ""
            if not found:
                continue
            line[f"s = {name}"] = f"{fmean(found.values()):.3f}"
            if row != "softmax":
                less = difference(found, data.losses("softmax", std))
                line[f"less softmax, s = {name}"] = less
            line[f"rate, n, s = {name}"] = f"{data.rate_of(row, std):g}, {len(found)}"
        if any(list(line.values())[1:]):
            table.append(line)
    return table


def contrasts_table(data):
    """The contrasts, at each arm's own rate, and at s = 1 at each rate of the grid."""
    table = []
    for name, (row, base) in CONTRASTS.items():
        line = {"": name}
        for start, std in STD.items():
            pair = data.losses(row, std), data.losses(base, std)
            line[f"own rates, s = {start}"] = difference(*pair)
        for lr in RATES:
            pair = [data.losses(which, 1.0, lr=lr, seeds=FEW) for which in (row, base)]
            line[f"{lr:g}"] = difference(*pair, digits=2) if all(map(len, pair)) else ""
        table.append(line)
    return table


def draw_rates(data, path):
    """Val loss against the rate, a panel for each start."""
    figure, axes = stats.new_figure(1, 2, width=9, height=5.5)
    for ax, (name, std) in zip(axes, STD.items()):
        for row in SHOWN:
            rates = sorted({run["lr"] for run in data.runs if run["row"] == row
                            and run["std"] == std and run["seed"] in FEW and run["head"] == "own"
                            and run["text"] == "manual" and run["size"] == "0.8 M"})
            found = [list(data.losses(row, std, lr=lr, seeds=FEW).values()) for lr in rates]
            ax.plot(rates, [fmean(losses) for losses in found], color=COLORS[row], linewidth=3,
                    label=NAMES[row])
            for lr, losses in zip(rates, found):
                ax.plot([lr] * len(losses), losses, "o", color=COLORS[row], alpha=0.4)
        ax.set(xscale="log", title=f"embedding's std {name}", ylim=(1.5, 2.15))
        ax.set_xticks([5e-4, 2e-3, 8e-3], ["0.0005", "0.002", "0.008"], minor=False)
        ax.set_xticks([], minor=True)
        ax.set_xlabel("learning rate")
    axes[0].set_ylabel("val loss, nats a byte\n(lower is better)")
    axes[1].legend(frameon=False, loc="upper center")
    figure.savefig(path)


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


def measure_stream(data):
    """[{row, std, step, shares}] of six models, each with its own rate, seed 3."""
    found = []
    text, val = load_text("manual")
    idx = torch.from_numpy(val[: 16 * 257].astype("int64")).view(16, 257)
    for row in SHOWN:
        for std in STD.values():
            cell = Cell(row, "own")
            rate = data.rate_of(row, std)
            config = replace(cell.config(), kernel="sdpa", lr=rate, seed=3, device="cpu")
            model = cell.model(std, seed=3)
            optimizer = train.make_optimizer(model, config)
            for step in range(config.steps + 1):
                if step in LOOKS:
                    shares = [round(share, 4) for share in shares_of(model, idx)]
                    found.append(dict(row=row, std=std, step=step, shares=shares))
                if step < config.steps:
                    train.training_step(model, optimizer, text, config, step)
            print(found[-len(LOOKS) :], flush=True)
    return found


def draw_stream(stream, path):
    """What attention adds, by layer: at the first step, and at the last one."""
    figure, axes = stats.new_figure(1, 2, width=9, height=5.5)
    for ax, step in zip(axes, (LOOKS[0], LOOKS[-1])):
        for row in SHOWN:
            for (name, std), line in zip(STD.items(), ("-", ":")):
                (found,) = [look["shares"] for look in stream if look["row"] == row
                            and look["std"] == std and look["step"] == step]
                ax.plot(range(1, 5), found, line, marker="o", color=COLORS[row], linewidth=3,
                        label=f"{NAMES[row]}, {name}")
        ax.set(yscale="log", title=f"after {step} steps", xlabel="layer", xticks=range(1, 5))
    axes[0].set_ylabel("what attention adds,\nbeside the stream")
    axes[1].legend(frameon=False, fontsize=11)
    figure.savefig(path)


def collect(about):
    """start.json of all runs below out/start."""
    runs = []
    for file in sorted(OUT.glob("*.jsonl")):
        runs += map(json.loads, file.read_text(encoding="utf-8").splitlines())
    stats.write_json(RESULTS / "start.json", about, runs)
    return runs


def main(argv=None):
    p = stats.parser("lab.start_page", __doc__)
    p.add_argument("verb", nargs="?", choices=["collect", "stream"])
    verb = p.parse_args(argv).verb
    about, runs = stats.read_json(RESULTS / "start.json")
    if verb == "collect":
        runs = collect(about)
    data = Data(runs)
    if verb == "stream":
        about["stream"] = measure_stream(data)
        stats.write_json(RESULTS / "start.json", about, runs)
    tables = {"arms": arms_table(data), "contrasts": contrasts_table(data)}
    stats.renew(RESULTS / "start.md", {name: stats.markdown(rows) for name, rows in tables.items()})
    draw_rates(data, RESULTS / "start-rates.png")
    draw_stream(about["stream"], RESULTS / "start-stream.png")


if __name__ == "__main__":
    main()
