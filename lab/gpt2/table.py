"""
The table and the figure of what run.sh has found.

$ python -m lab.gpt2.table out/gpt2-found/runs.jsonl curves.png
"""
import json
import sys
from pathlib import Path
from statistics import median

TEXTS = ("val_textbooks", "val_novels")
SETTINGS = ("seed", "lr", "mlp_width", "steps")  # in which runs of the same kind may differ


def read_runs(path):
    """[(head, rows, evaluations)]. A log begins with its settings, and the evaluations are among
    its rows.
    """
    runs = []
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        if "attn" in row:
            runs.append((row, [], []))
            continue
        runs[-1][1].append(row)
        if "val_loss" in row:
            runs[-1][2].append(row)
    return [run for run in runs if run[2]]


def name(head, runs):
    """The kind of attention, and what else tells this run from others of its kind."""
    others = [other for other, *_ in runs if other["attn"] == head["attn"]]
    differ = [s for s in SETTINGS if any(other[s] != head[s] for other in others)]
    return " ".join([head["attn"], *(f"{s}={head[s]}" for s in differ)])


def softmax_beside(head, runs, step):
    """The evaluation of softmax after as many steps, with the same seed and rates, or None."""
    for other, _, evaluations in runs:
        same = all(other[s] == head[s] for s in ("seed", "lr", "steps", "data_hash"))
        if other["attn"] == "softmax" != head["attn"] and same:
            return next((row for row in evaluations if row["step"] == step), None)


def table(runs):
    yield ("| run | M tokens | textbooks | less softmax | novels | less softmax | tokens/s "
           "| λ by layer |")
    yield "|---|---|---|---|---|---|---|---|"
    for head, rows, evaluations in runs:
        last = evaluations[-1]
        softmax = softmax_beside(head, runs, last["step"])
        cells = [name(head, runs), f"{last['tokens'] / 1e6:.1f}"]
        for text in TEXTS:
            cells.append(f"{last[text]:.4f}")
            cells.append(f"{last[text] - softmax[text]:+.4f}" if softmax else "")
        cells.append(f"{median(row['tok_per_s'] for row in rows if 'tok_per_s' in row):,.0f}")
        cells.append(" ".join(f"{x:.2f}" for x in last.get("lambda", [])))
        yield "| " + " | ".join(cells) + " |"


def draw(runs, path):
    """Val loss over tokens, a panel for each text."""
    import matplotlib.pyplot as plt  # here, since the table can do without it

    figure, panels = plt.subplots(1, 2, figsize=(9, 4), layout="tight")
    for panel, text in zip(panels, TEXTS):
        for head, _, evaluations in runs:
            tokens = [row["tokens"] / 1e6 for row in evaluations]
            losses = [row[text] for row in evaluations]
            panel.plot(tokens, losses, marker=".", label=name(head, runs))
        panel.set(title=text, xlabel="million tokens", ylabel="nats a token")
    panels[0].legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    runs = read_runs(sys.argv[1])
    print("\n".join(table(runs)))
    if len(sys.argv) > 2:
        draw(runs, sys.argv[2])
