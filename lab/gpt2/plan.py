"""
How many steps fit into so many seconds, if each kind of attention gets as many?

$ python -m lab.gpt2.plan STEPS.JSONL SECONDS TOKENS_A_STEP EVALUATIONS MOST softmax,diff

It prints their number, and how many steps of softmax take as long as those of diff_v2. The speeds
are those of STEPS.JSONL, which step.py writes. Where one is missing, they are an H200's.
"""
import json
import sys
from pathlib import Path

SPEEDS = dict(softmax=497e3, diff=448e3, diff_v2=385e3, softmax_norm=480e3, gated_average=465e3,
              diff_v2_smaller_plus=385e3)  # tokens a second
START = 32  # seconds, of which no step is made, if what is compiled lies on the disk
EVALUATION = 3  # seconds, with the sample and the checkpoint


def plan(speeds, seconds, tokens_a_step, evaluations, most, attns):
    seconds -= len(attns) * (START + EVALUATION * evaluations)
    a_step = sum(tokens_a_step / speeds[attn] for attn in attns)
    steps = min(most, int(0.96 * seconds / a_step))
    return max(evaluations, steps // evaluations * evaluations)  # equally many between two


if __name__ == "__main__":
    file, attns = Path(sys.argv[1]), sys.argv[6].split(",")
    speeds = dict(SPEEDS)
    rows = [json.loads(line) for line in file.open()] if file.exists() else []
    for row in sorted(rows, key=lambda row: row["mlp_width"] is None):  # the usual width counts
        speeds[row["attn"]] = row["tok_per_s"]
    steps = plan(speeds, *map(int, sys.argv[2:6]), attns)
    print(steps, round(steps * speeds["softmax"] / speeds["diff_v2"]))
