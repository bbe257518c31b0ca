"""
The tables and the figures of lab/results/start.md, from lab/results/start.json.

    python -m lab.start_page           # writes them
    python -m lab.start_page collect   # puts the runs of out/start into start.json before
    python -m lab.start_page stream    # trains six models, and measures what attention adds:
                                       # 20 minutes on a core
"""
import json
from dataclasses import fields
from statistics import fmean

import torch

from data import load_sequences
from lab import stats
from lab.start import (
    CHOOSE_ON, CHOOSE_V2_ON, FEW, OUT, RATES, SHOWN, V2, Cell, load_text, train_one,
)
from lab.stats import RESULTS

STD = {"std 1": 1.0, "std 0.05": None}  # the embedding's, at its start
LOW = 5e-4  # an eighth of the rate that softmax, softmax with the norm and diff chose
# the contrasts: a row less another one. First the answer of the page
ANSWER = [("diff", "softmax"), ("diff", "2 heads, norm, factor")]
ANSWER_AT_LOW = [("diff", "softmax"), ("softmax, norm", "softmax")]
# then what the second map does beside one map of its shape, and what all else does
SECOND_MAP = {
    "with norm and factor": ("diff", "2 heads, norm, factor"),
    "without norm": ("diff, no norm", "2 heads"),
    "with norm and factor 0.2": ("diff, λ_init 0.8", "2 heads, norm, factor 0.2"),
}
PARTS = {
    "all but the norm, beside softmax with it": ("diff", "softmax, norm"),
    "half the heads": ("2 heads", "softmax"),
    "the norm, in softmax": ("softmax, norm", "softmax"),
    "the norm and its factor, in `diff`": ("diff", "diff, no norm"),
    "a factor of 0.2": ("2 heads, norm, factor 0.2", "2 heads, norm, factor"),
    "half the heads, norm and factor 0.2": ("2 heads, norm, factor 0.2", "softmax"),
    "`diff` without its norm": ("diff, no norm", "softmax"),
    "`diff` with λ_init 0.8": ("diff, λ_init 0.8", "softmax"),
    "the second version": ("diff_v2", "softmax"),
    "the same, beside the factor 0.2": ("diff_v2", "2 heads, norm, factor 0.2"),
}
CELLS = len(STD) * (len(ANSWER) + len(ANSWER_AT_LOW) + len(SECOND_MAP) + len(PARTS))
CORRECTED = 1 - 0.05 / CELLS  # the level of an interval, by Bonferroni
# then one rate for both
AT_RATES = [("diff", "softmax"), ("diff", "softmax, norm"), ("softmax, norm", "softmax")]
LOOKS = (0, 100, 500)  # steps at which the stream is looked at
COLORS = {"softmax": "#0072B2", "softmax, norm": "#009E73", "diff": "#D55E00"}
NAMES = {  # of rows, where they are not those of lab/start.py
    "softmax, norm": "softmax with diff's norm",
    "2 heads": "one map, half the heads",
    "2 heads, norm, factor": "one map, half the heads, norm, factor",
    "2 heads, norm, factor 0.2": "one map, half the heads, norm, factor 0.2",
    "diff, no norm": "diff without its norm",
    "diff, λ_init 0.8": "diff with λ_init 0.8",
    "diff_v2, plus": "diff_v2 with a plus",
    "two gates": "two gated maps",
}


class Data:
    """The runs of start.json, by cell, embedding and rate."""

    def __init__(self, runs):
        self.found = {}  # {(cell, std): {rate: {(machine, seed): val loss}}}
        for run in runs:
            cell = Cell(**{field.name: run[field.name] for field in fields(Cell)})
            rates = self.found.setdefault((cell, run["std"]), {})
            rates.setdefault(run["lr"], {})[run["at"], run["seed"]] = run["val_loss"]

    def at(self, cell, std, lr):
        """{machine: losses} of the few seeds that were run at each rate."""
        return by_machine(self.found.get((cell, std), {}).get(lr, {}), lambda seed: seed in FEW)

    def reported(self, cell, std):
        """(rate, {machine: losses}): the rate that some seeds chose, and what the others gave."""
        rates = self.found.get((cell, std))
        if rates is None:
            return None, {}
        is_sign = cell.head == "tied" and cell.row in V2 and cell.text == "manual"
        chosen_on = CHOOSE_V2_ON if is_sign else CHOOSE_ON
        mean = {}
        for rate, losses in rates.items():
            tried = [loss for (_, seed), loss in losses.items() if seed in chosen_on]
            if tried:
                mean[rate] = fmean(tried)
        rate = min(mean, key=mean.get)
        return rate, by_machine(rates[rate], lambda seed: seed not in chosen_on)


def by_machine(losses, wanted):
    """{machine: the losses of the wanted seeds} of {(machine, seed): loss}."""
    found = {}
    for (machine, seed), loss in losses.items():
        if wanted(seed):
            found.setdefault(machine, []).append(loss)
    return found


def most(losses):
    """Those of the machine that has most, of {machine: losses}."""
    return max(losses.values(), key=len, default=[])


def pair_of(a, b):
    """(losses of a, losses of b, is it on one machine?) of two {machine: losses}.

    The machine is that which has most runs of both. If there is none, all runs are taken.
    """
    both = {machine: min(len(a[machine]), len(b[machine])) for machine in a if machine in b}
    if both and max(both.values()) >= 3:
        machine = max(both, key=both.get)
        return a[machine], b[machine], True
    return sum(a.values(), []), sum(b.values(), []), False


def words(rows):
    """The difference of two rows, like "diff − softmax"."""
    return " − ".join(NAMES.get(row, row) for row in rows)


def losses_of(data, rows, std, lr=None):
    """Of two rows, at a rate for both, or each at its own: see pair_of. None: too few were run."""
    cells = [Cell(row, "own") for row in rows]
    if lr is None:
        found = [data.reported(cell, std)[1] for cell in cells]
    else:
        found = [data.at(cell, std, lr) for cell in cells]
    a, b, on_one_machine = pair_of(*found)
    return (a, b, on_one_machine) if min(len(a), len(b)) >= len(FEW) else None


def marked(a, b, on_one_machine):
    """Their difference, bold if it excludes 0 when corrected for the number of cells."""
    text = stats.plus_minus(*stats.difference(a, b))
    mean, half = stats.difference(a, b, CORRECTED)
    if abs(mean) > half:
        text = f"**{text}**"
    return text if on_one_machine else f"{text} †"


def line_of(data, rows, lr=None):
    """The cells of a line: the difference of two rows at both starts, and n."""
    line = {}
    n = []
    for name, std in STD.items():
        line[name] = ""
        found = losses_of(data, rows, std, lr)
        if found is not None:
            a, b, on_one_machine = found
            line[name] = marked(a, b, on_one_machine)
            n += [len(a), len(b)]
    return line | {"n": min(n)}


def table_of_answer(data):
    """The first table of the page."""
    own = [{"rate": "each its own", "difference": words(rows)} | line_of(data, rows)
           for rows in ANSWER]
    low = [{"rate": f"{LOW:g} for both", "difference": words(rows)} | line_of(data, rows, LOW)
           for rows in ANSWER_AT_LOW]
    return own + low


def table_of_parts(data, parts):
    """What each of the parts does, each row at its own rate."""
    return [{"part": part, "difference": words(rows)} | line_of(data, rows)
            for part, rows in parts.items()]


def table_of_length(data):
    """Losses after 2,000 steps at std 1: of seed 1 at some rates, and of others at their own."""
    found = {}
    for row in SHOWN:
        cell = Cell(row, "own", text="stdlib", steps=2000)
        rates = data.found.get((cell, 1.0), {})
        tried = {lr: loss for lr, losses in rates.items()
                 for (_, seed), loss in losses.items() if seed == 1}
        found[row] = tried, most(data.reported(cell, 1.0)[1])
    table = []
    for row, (tried, losses) in found.items():
        line = {"2,000 steps, std 1": NAMES.get(row, row)}
        for lr in sorted({lr for tried, _ in found.values() for lr in tried}):
            line[f"{lr:g}, seed 1"] = f"{tried[lr]:.3f}" if lr in tried else ""
        mean = stats.plus_minus(*stats.mean_interval(losses)) if losses else ""
        table.append(line | {"its own rate, other seeds": mean, "n": len(losses)})
    return table


def table_of_rates(data):
    """What one would see who tried one rate."""
    table = []
    for name, std in STD.items():
        for rows in AT_RATES:
            line = {"start": name, "difference": words(rows)}
            for lr in RATES:
                a, b, _ = losses_of(data, rows, std, lr)
                line[f"{lr:g}"] = stats.plus_minus(*stats.difference(a, b), digits=2)
            table.append(line)
    return table


def parts_of(data):
    """{name: text} of the parts of start.md that are made of the runs."""
    tables = {
        "answer": table_of_answer(data),
        "second map": table_of_parts(data, SECOND_MAP),
        "parts": table_of_parts(data, PARTS),
        "length": table_of_length(data),
        "rates": table_of_rates(data),
    }
    return {name: stats.markdown(table) for name, table in tables.items()}


def draw_rates(data, path):
    """Val loss against the rate, a panel for each start."""
    figure, axes = stats.new_figure(1, 2, width=9, height=5.5)
    for ax, (name, std) in zip(axes, STD.items()):
        for row in SHOWN:
            found = [most(data.at(Cell(row, "own"), std, lr)) for lr in RATES]
            means = [fmean(losses) for losses in found]
            ax.plot(RATES, means, color=COLORS[row], linewidth=3, label=NAMES.get(row, row))
            for lr, losses in zip(RATES, found):
                ax.plot([lr] * len(losses), losses, "o", color=COLORS[row], alpha=0.4)
        ax.set(xscale="log", title=f"embedding's {name}", ylim=(1.47, 2.15))
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
    _, val = load_text("manual")
    idx = load_sequences(val, range(16), 256)
    for row in SHOWN:
        for std in STD.values():
            cell = Cell(row, "own")

            def look(step, model, row=row, std=std):
                if step in LOOKS:
                    shares = [round(share, 4) for share in shares_of(model, idx)]
                    found.append(dict(row=row, std=std, step=step, shares=shares))
                    print(found[-1], flush=True)

            train_one(cell, std, data.reported(cell, std)[0], 3, look)
    return found


def draw_stream(stream, path):
    """What attention adds, by layer, before the first step and after the last: a panel a start."""
    figure, axes = stats.new_figure(1, 2, width=9, height=5.5)
    for ax, (name, std) in zip(axes, STD.items()):
        for look in stream:
            if look["std"] == std and look["step"] in (LOOKS[0], LOOKS[-1]):
                is_first = look["step"] == LOOKS[0]
                row = look["row"]
                label = NAMES.get(row, row) if is_first else None
                ax.plot(range(1, 5), look["shares"], "-" if is_first else ":", marker="o",
                        color=COLORS[row], linewidth=3, label=label)
        ax.set(yscale="log", ylim=(0.02, 30), title=f"embedding's {name}", xlabel="layer")
        ax.set_xticks(range(1, 5))
        ticks = [3, 10, 30, 100, 300, 1000]
        ax.set_yticks([tick / 100 for tick in ticks], [f"{tick} %" for tick in ticks])
        ax.set_yticks([], minor=True)
    axes[0].set_ylabel("size of what attention adds,\nbeside the stream that it reads")
    title = "solid: at the start\ndotted: after 500 steps"
    axes[0].legend(frameon=False, loc="upper center", title=title)
    axes[1].tick_params(labelleft=False)
    figure.savefig(path)


def collect(runs):
    """These runs, and those below out/start, of which each takes the place of an older one."""
    files = sorted(OUT.glob("*.jsonl"))
    if not files:
        raise SystemExit(f"there are no runs below {OUT}: python -m lab.start trains them")
    new = [json.loads(line) for file in files
           for line in file.read_text(encoding="utf-8").splitlines()]
    found = {}
    for run in runs + new:
        cell = tuple(run[field.name] for field in fields(Cell))
        found[cell, run["std"], run["lr"], run["seed"], run["at"]] = run
    return list(found.values())


def main(argv=None):
    p = stats.parser("lab.start_page", __doc__)
    p.add_argument("verb", nargs="?", choices=["collect", "stream"])
    verb = p.parse_args(argv).verb
    file = RESULTS / "start.json"
    about, runs = stats.read_json(file) if file.exists() else ({}, [])
    if verb == "collect":
        runs = collect(runs)
    data = Data(runs)
    if verb == "stream":
        about["stream"] = measure_stream(data)
    if verb is not None:
        stats.write_json(file, about, runs)
    stats.renew(RESULTS / "start.md", parts_of(data))
    draw_rates(data, RESULTS / "start-rates.png")
    if "stream" in about:
        draw_stream(about["stream"], RESULTS / "start-stream.png")


if __name__ == "__main__":
    main()
