"""
Trains arms on text, each at its own best learning rate, and compares them.

    python -m lab.text toy                         # 22 rows, some 250 runs
    python -m lab.text toy --rows="softmax,diff*"  # these now, the others another time
    python -m lab.text toy --publish               # train nothing, show what is there

The tables are toy (decay, the norm, the difference), average (one map minus the plain average),
controls (what decay and the minus bring), table6 (of the paper), v2 (DIFF V2 with 40 seeds) and
gpt2 (the plan for an H100, see lab/results/gpt2/plan.md). Stop it whenever you like, the same
command goes on. Start it twice with other --rows to use more cores.

Half of the heads: a differential arm has half as many heads as softmax, so "2 heads" gives one map
as many. A row is a name and its flags for train.py. For another one, edit ROWS and the table.
"""
import argparse
import fnmatch
import math
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import UserError, cli, path
from lab import report, sweep
from model import ATTENTION, Attention, DiffV2, Linear, LinearAverage, Softmax, SoftmaxAverage
from model import full_width, upcast

# ---- arms that are controls. Nobody is meant to use them for anything else


class OneShortHead(Linear):
    """Linear attention whose first head has a span of 4 tokens. The others never forget."""

    def decay_rate(self, x):
        rate = torch.zeros_like(super().decay_rate(x))  # 0: gamma is 1
        rate[0] = 1 / 4
        return rate


def shift(x):
    """x (B, T, C), with the second half of the channels from the token before."""
    half = x.shape[-1] // 2
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    return torch.cat((x[..., :half], before[..., half:]), dim=-1)


def with_shift(cls):
    """Attention that sees the token before without looking for it."""

    class WithShift(cls):
        def project(self, x):
            return super().project(shift(x))

        # a fast step sees one token only. These see all of them
        prefill = Attention.prefill
        step = Attention.step
        fixed_state = False

    return WithShift


class MinusMatched(DiffV2):
    """(A_1 - lambda A_2) / (1 - lambda): its rows sum to 1, as those of one map do."""

    def subtract(self, y, lam):
        return super().subtract(y, lam) / (1 - lam)


class PlusMatched(DiffV2):
    """(A_1 + lambda A_2) / (1 + lambda): two maps, rows that sum to 1, and no minus."""

    def subtract(self, y, lam):
        return super().subtract(y, -lam) / (1 + lam)


class Gate(Softmax):
    """A_ij sigmoid(w . x_i): one map, whose output each token and head multiplies by its own gate.

    What is left of diff_v2 without its second map: there a row sums to 1 - lambda_i, and lambda_i
    is a sigmoid, too. The MLP beside it is narrower, so that a model has softmax's parameters.
    """

    def __init__(self, config, depth):
        super().__init__(config, depth)
        # for C h parameters more than softmax's. A unit of width has 3 C, in three matrices
        self.mlp_width = max(8, full_width(config.n_embd) - round(config.n_head / 3))

    def make_lambda(self, depth):
        self.gate_proj = nn.Linear(self.config.n_embd, self.config.n_head, bias=False)

    def project(self, x):
        """In the place of lambda there is the gate, (B, h, T, 1). It starts near 1/2."""
        q, k, v, _ = super().project(x)
        return q, k, v, upcast(self.gate_proj(x)).sigmoid().mT[..., None]

    def subtract(self, y, gate):
        """Nothing is subtracted: the gate multiplies rows of the map, or of the output."""
        return upcast(y) * gate


def with_factor(cls):
    """One map whose norm is followed by the factor 1 - lambda_init of diff, layer by layer."""

    class WithFactor(cls):
        def make_lambda(self, depth):
            super().make_lambda(depth)
            self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)

    return WithFactor


ARMS = {
    "linear_one_short_head": OneShortHead,
    "linear_shift": with_shift(Linear),
    "softmax_shift": with_shift(Softmax),
    "diff_v2_minus_matched": MinusMatched,
    "diff_v2_plus_matched": PlusMatched,
    "gate": Gate,
    "softmax_factor": with_factor(Softmax),
    "softmax_average_factor": with_factor(SoftmaxAverage),
    "linear_factor": with_factor(Linear),
    "linear_average_factor": with_factor(LinearAverage),
}
ATTENTION.update(ARMS)  # --attn of train.py knows them, and so does GPT.load

# ---- the rows, {name: flags of train.py}. Tables that have a row in common share its runs

LARGE = "--embd_init=0.2"  # an embedding that starts four times as large
ROWS = {
    "softmax": "--attn=softmax",
    "softmax 2 heads": "--attn=softmax --n_head=2",
    "softmax 2 heads norm": "--attn=softmax --n_head=2 --subln",
    "diff": "--attn=diff",
    "diff no norm": "--attn=diff --no-subln",
    "linear": "--attn=linear",
    "linear 2 heads": "--attn=linear --n_head=2",
    "linear 2 heads norm": "--attn=linear --n_head=2 --subln",
    "diff_linear": "--attn=diff_linear",
    "diff_linear no norm": "--attn=diff_linear --no-subln",
    "diff_v2": "--attn=diff_v2",
    "gate": "--attn=gate",
    # one map minus lambda times the plain average of the values: all heads and no norm, as --attn
    # has it, and like diff, which has half the heads, and a norm with a factor behind it
    "softmax minus average": "--attn=softmax_average",
    "softmax like diff": "--attn=softmax_factor --n_head=2 --subln",
    "softmax like diff minus average": "--attn=softmax_average_factor --n_head=2 --subln",
    "linear minus average": "--attn=linear_average",
    "linear like diff": "--attn=linear_factor --n_head=2 --subln",
    "linear like diff minus average": "--attn=linear_average_factor --n_head=2 --subln",
    # controls
    "linear token shift": "--attn=linear_shift",
    "linear no rotation": "--attn=linear --rope_theta=0",
    "softmax token shift": "--attn=softmax_shift",
    "softmax norm": "--attn=softmax --subln",
    "softmax 2 heads small norm": "--attn=softmax --n_head=2 --subln --subln_init=0.2",
    "diff small norm": "--attn=diff --subln_init=0.2",
    "softmax large embedding": f"--attn=softmax {LARGE}",
    "softmax 2 heads large embedding": f"--attn=softmax --n_head=2 {LARGE}",
    "softmax 2 heads norm large embedding": f"--attn=softmax --n_head=2 --subln {LARGE}",
    "diff large embedding": f"--attn=diff {LARGE}",
    "diff no norm large embedding": f"--attn=diff --no-subln {LARGE}",
    "diff_v2 minus matched": "--attn=diff_v2_minus_matched",
    "diff_v2 plus matched": "--attn=diff_v2_plus_matched",
    "diff lambda_init 0.8": "--attn=diff --lambda_init=0.8",
    "diff lambda_init 0.5": "--attn=diff --lambda_init=0.5",
}
ROWS |= {f"{name} + decay": f"{flags} --decay" for name, flags in ROWS.items()}
ROWS["linear one short head"] = "--attn=linear_one_short_head --decay"

# ---- the tables. A comparison says what is asked, in which row, and against which one


def rows_of(comparisons):
    """The rows that these comparisons need, in their order."""
    names = []
    for _, row, base in comparisons:
        names += [base, row]
    return {name: ROWS[name] for name in names}


def ask_with_decay(comparisons):
    """The comparisons without decay, and the same with it."""
    more = [(f"{what}, with decay", f"{row} + decay", f"{base} + decay")
            for what, row, base in comparisons]
    return comparisons + more


TOY = [
    ("diff as in the paper", "diff", "softmax"),
    ("the difference alone: heads alike, no norm", "diff no norm", "softmax 2 heads"),
    ("the difference and its factor: heads, norm alike", "diff", "softmax 2 heads norm"),
    ("the norm of diff", "diff", "diff no norm"),
    ("the norm of one map", "softmax 2 heads norm", "softmax 2 heads"),
    ("half the heads in softmax", "softmax 2 heads", "softmax"),
    ("DIFF V2, parameters alike", "diff_v2", "softmax"),
    ("linear instead of softmax", "linear", "softmax"),
    ("diff_linear", "diff_linear", "linear"),
    ("the difference alone: heads, state alike", "diff_linear no norm", "linear 2 heads"),
    ("the difference and its factor: heads, norm alike", "diff_linear", "linear 2 heads norm"),
    ("the norm of diff_linear", "diff_linear", "diff_linear no norm"),
    ("the norm of one linear map", "linear 2 heads norm", "linear 2 heads"),
    ("half the heads in linear", "linear 2 heads", "linear"),
]

AVERAGE = [
    ("minus the average", "softmax minus average", "softmax"),
    ("the same like diff", "softmax like diff minus average", "softmax like diff"),
    ("a second map, all else alike", "diff", "softmax like diff"),
    ("a second map in its place", "diff", "softmax like diff minus average"),
    ("a second map in its place, no norm", "diff no norm", "softmax minus average"),
    ("minus the average", "linear minus average", "linear"),
    ("the same like diff_linear", "linear like diff minus average", "linear like diff"),
    ("a second map, all else alike", "diff_linear", "linear like diff"),
    ("a second map in its place", "diff_linear", "linear like diff minus average"),
    ("a second map in its place, no norm", "diff_linear no norm", "linear minus average"),
]

CONTROLS = [
    ("decay in one of 4 heads, span 4 tokens", "linear one short head", "linear"),
    ("a token shift: half of each token is the one before", "linear token shift", "linear"),
    ("token shift: with decay", "linear token shift + decay", "linear token shift"),
    ("no rotary embedding", "linear no rotation", "linear"),
    ("no rotary embedding: with decay", "linear no rotation + decay", "linear no rotation"),
    ("a token shift", "softmax token shift", "softmax"),
    ("a norm", "softmax norm", "softmax"),
    ("a norm that starts at 0.2: 2 heads", "softmax 2 heads small norm", "softmax 2 heads"),
    ("the norm of diff, starting at 0.2", "diff small norm", "diff no norm"),
    ("the difference and its factor, norms start at 0.2",
     "diff small norm", "softmax 2 heads small norm"),
    ("diff, its norm starts at 0.2", "diff small norm", "softmax"),
    ("a norm, large embedding: 2 heads",
     "softmax 2 heads norm large embedding", "softmax 2 heads large embedding"),
    ("the norm of diff, large embedding", "diff large embedding", "diff no norm large embedding"),
    ("the difference and its factor, large embedding",
     "diff large embedding", "softmax 2 heads norm large embedding"),
    ("diff, large embedding", "diff large embedding", "softmax large embedding"),
    ("a large embedding", "softmax large embedding", "softmax"),
    ("a large embedding: 2 heads", "softmax 2 heads large embedding", "softmax 2 heads"),
    ("a large embedding: 2 heads, norm",
     "softmax 2 heads norm large embedding", "softmax 2 heads norm"),
    ("a large embedding in diff", "diff large embedding", "diff"),
    ("a large embedding in diff, no norm", "diff no norm large embedding", "diff no norm"),
    ("DIFF V2, rows sum to 1", "diff_v2 minus matched", "softmax"),
    ("a plus, rows sum to 1", "diff_v2 plus matched", "softmax"),
    ("minus instead of plus", "diff_v2 minus matched", "diff_v2 plus matched"),
]

PARTS = ["softmax 2 heads", "softmax 2 heads norm", "diff", "diff no norm", "diff lambda_init 0.8",
         "diff lambda_init 0.5"]
TABLE_6 = [("", row, "softmax") for row in PARTS]

# the first five rows are the first group of the plan
GPT2 = {
    "softmax": "--attn=softmax",
    "softmax minus average": "--attn=softmax_average",
    "diff": "--attn=diff",
    "linear": "--attn=linear",
    "diff_linear": "--attn=diff_linear",
    "diff_v2": "--attn=diff_v2",
    "linear minus average": "--attn=linear_average",
    "softmax 6 heads": "--attn=softmax --n_head=6",
    "softmax like diff minus average": "--attn=softmax_average_factor --n_head=6 --subln",
    "linear 6 heads norm + decay": "--attn=linear --n_head=6 --subln --decay",
    "linear minus average + decay": "--attn=linear_average --decay",
    "diff_linear + decay": "--attn=diff_linear --decay",
    "softmax 6 heads + decay": "--attn=softmax --n_head=6 --decay",
    "softmax minus average + decay": "--attn=softmax_average --decay",
}
GPT2_COMPARISONS = [
    ("does the paper's gain come", "diff", "softmax"),
    ("is it the average's?", "diff", "softmax minus average"),
    ("what the average alone brings", "softmax minus average", "softmax"),
    ("does the difference rescue linear attention?", "diff_linear", "linear"),
    ("DIFF V2", "diff_v2", "softmax"),
    ("diff_linear with decay: heads, state, norm alike",
     "diff_linear + decay", "linear 6 heads norm + decay"),
    ("half the heads", "diff", "softmax 6 heads"),
    ("a second map or the average, like diff", "diff", "softmax like diff minus average"),
    ("the average in linear attention", "linear minus average", "linear"),
    ("a second linear map or the average", "diff_linear", "linear minus average"),
]


class Table(NamedTuple):
    title: str
    comparisons: list
    flags: str = "--preset=toy --eval_every=250"  # what all rows share
    rows: dict | None = None  # None: those of the comparisons
    out: Path = Path("out/text")  # tables of the same size share their runs
    lr: float = 2e-3  # the rate that is tried first
    choose_on: tuple = (1, 2)  # the seeds that choose a row's rate
    seeds: tuple = (3, 4, 5, 6, 7)  # and those that are reported


TABLES = {
    "toy": Table(
        "What matters on text: decay, the norm, the difference?",
        ask_with_decay(TOY) + [("decay", f"{row} + decay", row) for row in rows_of(TOY)],
    ),
    "average": Table(
        "Does one map minus the average do what the difference of two maps does?",
        ask_with_decay(AVERAGE),
    ),
    "controls": Table("Why does decay help, and does the minus matter?", CONTROLS),
    "table6": Table("Which part of diff does what? Table 6 of the paper", TABLE_6),
    "v2": Table(
        "Does DIFF V2 gain on text? More seeds",
        [("DIFF V2, parameters alike", "diff_v2", "softmax")],
        seeds=tuple(range(8, 48)),
    ),
    "gate": Table(
        "Is DIFF V2's gain a gate's?",
        [("a gate, parameters alike", "gate", "softmax"), ("DIFF V2 or a gate", "diff_v2", "gate")],
        choose_on=tuple(range(48, 56)),
        seeds=tuple(range(8, 48)),
    ),
    "gpt2": Table(
        "What does the difference gain at the size of GPT-2?",
        GPT2_COMPARISONS,
        flags="--preset=gpt2",
        rows=GPT2,
        out=Path("out/gpt2"),
        lr=1.5e-3,
        choose_on=(1,),
        seeds=(2, 3, 4),
    ),
}

# ---- what is published


def differences_table(runs, comparisons):
    """What each comparison comes to, where both of its rows are there."""
    there = set(runs["arm"])
    asked = [c for c in comparisons if there.issuperset(c[1:])]
    found = report.compare(runs, [(row, base) for _, row, base in asked])
    table = report.plus_minus(found, "difference")
    table.insert(0, "what is asked", [what for what, _, _ in asked])
    return table


def rates_table(runs, order):
    """The mean loss of each row at each rate that was tried, on the seeds that chose."""
    table = runs.pivot_table("loss", "arm", "lr").reindex(order)
    return table.rename(columns="{:g}".format).reset_index()


def publish(name, table, runs, out):
    """Tables, figure and data of the finished rows: <out>/<name>.md, .png and .json."""
    for what in ("data_sha256", "dtype", "steps", "total_batch"):
        if runs[what].nunique() > 1:
            raise UserError(f"the runs in {out} differ in {what}: choose another --out")
    reported = runs[runs["reported"]]
    unit = "nats per byte" if runs["tokenizer"][0] == "bytes" else "nats per token"
    losses = report.average(reported, ["arm", "parameters", "lr"], ["loss"])
    rates = rates_table(runs[~runs["reported"]], losses["arm"])
    tables = {
        f"Final val loss, {unit}": losses.rename(columns={"loss": "val loss"}),
        f"Differences, {unit}": differences_table(reported, table.comparisons),
        f"Val loss by rate, on the seeds that chose it, {unit}": rates,
    }
    conditions = report.conditions_of(runs)
    conditions["seeds"] = f"{table.seeds} reported, {table.choose_on} chose the rates"
    figure, (ax,) = report.new_figure(width=9, height=2 + 0.45 * len(losses))
    report.dots(ax, reported)
    ax.set(xlabel=f"val loss, {unit}")
    report.publish(out, name, table.title, tables, runs.to_dict("records"), conditions, figure)


def pick(rows, patterns):
    """The rows whose name fits one of the patterns. UserError for a pattern that fits none."""
    picked = []
    for pattern in patterns.split(","):
        fitting = fnmatch.filter(rows, pattern.strip())
        if not fitting:
            raise UserError(f"--rows={pattern} is not a row. There are: {', '.join(rows)}")
        picked += fitting
    return {name: rows[name] for name in rows if name in picked}


def main(argv=None):
    p = argparse.ArgumentParser(
        prog="python -m lab.text",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("table", choices=TABLES)
    p.add_argument("--rows", default="*", help="a comma list of rows, * stands for anything (all)")
    p.add_argument("--out", type=path, help="folder of runs and results (out/text, out/gpt2)")
    p.add_argument("--publish", action="store_true", help="train nothing, publish what is there")
    args = p.parse_args(argv)
    report.need("pandas")
    table = TABLES[args.table]
    rows = pick(table.rows or rows_of(table.comparisons), args.rows)
    rows = {name: f"{table.flags} {flags}" for name, flags in rows.items()}
    out = args.out or table.out
    runs = sweep.run_rows(rows, out, table.lr, table.choose_on, table.seeds, args.publish)
    publish(args.table, table, runs, out)


if __name__ == "__main__":
    cli(main)
