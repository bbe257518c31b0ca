"""
What matters at toy size: forgetting, the norm, or the difference of two maps?

    python -m experiments.toy                           # 22 rows, some 250 runs
    python -m experiments.toy --rows="softmax*,diff*"   # these rows only, the rest can follow later
    python -m experiments.toy --publish                 # tables and figure of what is there by now
    python -m experiments.toy --controls                # what does decay bring? is it the minus?

Eleven arms, without and with decay. A differential arm has half as many heads, so each of the
one-map arms also appears with half the heads: softmax and linear attention with `--n_head=2` have
the heads, the decay spans and (linear) the state of their differential arm, and the same
parameters but for lambda and the norm. They appear with and without the norm. diff_v2 (DIFF V2)
has second queries, which a narrower MLP pays for, so that it has the parameters of softmax.

By default each row has its own best rate, chosen on seeds 1 and 2, and is reported on seeds 3 to 7.
The intervals are 95 % intervals of Student's t. There are two pooled standard deviations, one for
the rows without decay and one for those with it, which differ less by seed. If the two rows of a
difference are from different pools, it has Welch's interval. Of some seventy comparisons three
or four would be beyond their interval by chance if nothing had an effect. Other flags are
train.py's.

What we predicted before the runs of each item, and what came (nats per byte):

1.  Two arms that differ in the difference of two maps alone are less than 0.02 nats apart.
    - Without the norm: yes with decay, in softmax and linear attention. Without decay not decided
      in softmax (-0.006 +- 0.016), and no in linear attention, which it costs 0.09. With the norm
      no, see 6.
2.  The norm costs less than 0.05 nats. (It cost 0.2 where weights began so small that all maps
    were flat.)
    - No: 0.06 in diff, and 0.05 with decay. In diff_linear it gains 0.04, and with decay it costs
      0.04.
3.  DIFF V2 gains 0.01 +- 0.008 over softmax if each has its own rate. (With the old init and one
    rate for both it had gained 0.033.)
    - It gains 0.018 +- 0.010 with decay. Without decay, 0.015 +- 0.016, it is at the limit.
4.  Decay helps because it favours the nearest tokens. So one head of span 4, beside heads that
    never forget, is within 0.02 nats of decay. A token shift recovers 70 % of what decay brings to
    linear attention, and it gives softmax as much as decay. If it is forgetting that counts, the
    short head and the shift each bring less than half of what decay brings.
    - Yes as a mean, 0.014 +- 0.009. One head of span 4 beside three that never forget brings 0.600
      of the 0.614, and the token shift 0.455, which is 74 %. In softmax the shift brings 0.027 and
      decay 0.032, which is not told apart. So most of what linear attention lacks without decay is
      a look at the nearest tokens. Beside the shift decay still brings 0.171.
5.  With rows that sum to 1, a plus in the place of the minus costs less than 0.01 nats.
    - Not decided: the plus costs 0.004 +- 0.016. And with rows that sum to 1 DIFF V2 shows no
      gain: its loss is 0.006 above softmax with the minus, and 0.010 with the plus (+- 0.016).
6.  The norm costs one map what it costs two: softmax with two heads 0.06, and linear attention
    with two heads 0.04 with decay. So where both have the norm, the difference alone is again less
    than 0.02 with decay and in softmax. Without decay the norm helps linear attention with two
    heads by 0.03, and diff_linear stays 0.05 or more behind it.
    - No, the norm costs softmax with two heads more than diff, 0.101 without and 0.072 with decay.
      So where both have the norm, diff is better than softmax by 0.045 +- 0.016 and 0.027 +- 0.010.
      (But diff also has the factor 1 - lambda_init, and softmax has not.) In linear attention with
      decay the norm costs both 0.04, and diff_linear is level (-0.007). Without decay the norm
      gains 0.088 in one map, and diff_linear is 0.133 +- 0.016 behind.
7.  The norm costs so much because it starts too large: with a weight of 1 the first layer's
    attention begins three to four times as large as the embedding that it is added to. So if the
    weight starts at 0.2, the norm costs diff less than 0.03 in the place of 0.06, and softmax with
    two heads less than 0.05 in the place of 0.10.
    - Both numbers yes: 0.011 in diff and 0.006 in softmax (+- 0.016). So most of the cost was that
      start. Whether its size beside the embedding is the reason, see 8. What diff gains over
      softmax where both norms start at 1, see 6, is no longer seen: 0.001 +- 0.016.
8.  What counts is how large the norm's output is beside the embedding. So with an embedding of
    standard deviation 0.2, which is four times as large, the norm costs diff and softmax with two
    heads less than 0.03 as well, though it starts at 1. Diff is then less than 0.03 from softmax.
    - All numbers yes: it costs softmax 0.000 and diff -0.013 (+- 0.016), and diff has -0.001
      against plain softmax, where it had +0.062. But the reason is not shown: with the norm the
      models are as good as before, and without it 0.09 worse (softmax with 4 heads 0.074 +- 0.016).
      Not predicted: where both have the norm, diff is better than softmax by 0.020 +- 0.016.
"""
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

import bench
import report
import train
from experiments import grid
from experiments.diff_v2 import DiffV2, matched_width
from experiments.diff_v2 import register as register_diff_v2
from model import ATTENTION, Linear, Softmax

SEEDS = "3,4,5,6,7"
CHOOSE_ON = "1,2"
RATES = "2e-3,4e-3"  # one of the two is always at an edge, so at least one more is tried

ARMS = {
    "softmax": ["--attn=softmax"],
    "softmax 2 heads": ["--attn=softmax", "--n_head=2"],
    "softmax 2 heads norm": ["--attn=softmax", "--n_head=2", "--subln"],
    "diff": ["--attn=diff"],
    "diff no norm": ["--attn=diff", "--no-subln"],
    "linear": ["--attn=linear"],
    "linear 2 heads": ["--attn=linear", "--n_head=2"],
    "linear 2 heads norm": ["--attn=linear", "--n_head=2", "--subln"],
    "diff_linear": ["--attn=diff_linear"],
    "diff_linear no norm": ["--attn=diff_linear", "--no-subln"],
    "diff_v2 narrow": ["--attn=diff_v2", "--mlp_width={narrow}"],  # see fill_in
}

# the question, and the two arms whose difference answers it, with the same decay
COMPARISONS = [
    ("Diff as in the paper", "diff", "softmax"),
    ("the difference alone: heads alike, no norm", "diff no norm", "softmax 2 heads"),
    ("the difference and its factor: heads, norm alike", "diff", "softmax 2 heads norm"),
    ("the norm of diff", "diff", "diff no norm"),
    ("the norm of one map", "softmax 2 heads norm", "softmax 2 heads"),
    ("half the heads in softmax", "softmax 2 heads", "softmax"),
    ("DIFF V2, parameters alike", "diff_v2 narrow", "softmax"),
    ("linear instead of softmax", "linear", "softmax"),
    ("diff_linear", "diff_linear", "linear"),
    ("the difference alone: heads, state alike, no norm", "diff_linear no norm", "linear 2 heads"),
    ("the difference and its factor: heads, state, norm alike",
     "diff_linear", "linear 2 heads norm"),
    ("the norm of diff_linear", "diff_linear", "diff_linear no norm"),
    ("the norm of one linear map", "linear 2 heads norm", "linear 2 heads"),
    ("half the heads in linear", "linear 2 heads", "linear"),
]


# the next classes are arms of the second part. They are controls, nobody is meant to use them


class OneShortHead(Linear):
    """Linear attention whose first head has a span of 4. The others never forget."""

    def decay_rate(self, *args):
        rate = torch.zeros_like(super().decay_rate(*args))  # 0: gamma is 1
        rate[0] = 1 / 4
        return rate


def shift(x):
    """x (B, T, C), with the second half of the channels from the token before."""
    half = x.shape[-1] // 2
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    return torch.cat((x[..., :half], before[..., half:]), dim=-1)


class ShiftLinear(Linear):
    """Linear attention that sees the token before without looking for it.

    Its step, one token at a time, does not know that token: the samples in its log mean nothing.
    """

    def project(self, x):
        return super().project(shift(x))


class ShiftSoftmax(Softmax):
    """The same for softmax."""

    def project(self, x):
        return super().project(shift(x))


class MinusMatched(DiffV2):
    """(A_1 - lambda A_2) / (1 - lambda): its rows sum to 1, as those of one map do."""

    def subtract(self, y, lam):
        return super().subtract(y, lam) / (1 - lam)


class PlusMatched(DiffV2):
    """(A_1 + lambda A_2) / (1 + lambda): two maps, rows that sum to 1, and no minus."""

    def subtract(self, y, lam):
        return super().subtract(y, -lam) / (1 + lam)


def register():
    """Makes DIFF V2 and the controls known to --attn."""
    register_diff_v2()
    ATTENTION["linear_one_short_head"] = OneShortHead
    ATTENTION["linear_shift"] = ShiftLinear
    ATTENTION["softmax_shift"] = ShiftSoftmax
    ATTENTION["diff_v2_minus_matched"] = MinusMatched
    ATTENTION["diff_v2_plus_matched"] = PlusMatched


# these also appear with an embedding four times as large
ENLARGED = ["softmax", "softmax 2 heads", "softmax 2 heads norm", "diff", "diff no norm"]

# they are compared with rows of the first part, whose runs they share
CONTROLS = {
    "linear one short head": ["--attn=linear_one_short_head", "--decay"],
    "linear token shift": ["--attn=linear_shift", "--no-decay"],
    "linear token shift + decay": ["--attn=linear_shift", "--decay"],
    "linear no rotation": ["--attn=linear", "--rope_theta=0", "--no-decay"],
    "linear no rotation + decay": ["--attn=linear", "--rope_theta=0", "--decay"],
    "softmax token shift": ["--attn=softmax_shift", "--no-decay"],
    "softmax norm": ["--attn=softmax", "--subln", "--no-decay"],
    "softmax 2 heads small norm": [
        "--attn=softmax", "--n_head=2", "--subln", "--subln_init=0.2", "--no-decay"],
    "diff small norm": ["--attn=diff", "--subln_init=0.2", "--no-decay"],
    **{f"{arm} large embedding": [*ARMS[arm], "--embd_init=0.2", "--no-decay"]
       for arm in ENLARGED},
    "diff_v2 narrow minus matched": [
        "--attn=diff_v2_minus_matched", "--mlp_width={narrow}", "--no-decay"],
    "diff_v2 narrow plus matched": [
        "--attn=diff_v2_plus_matched", "--mlp_width={narrow}", "--no-decay"],
}
BESIDE_CONTROLS = [
    "softmax", "softmax + decay", "linear", "linear + decay", "diff_v2 narrow",
    "softmax 2 heads", "softmax 2 heads norm", "diff", "diff no norm"]

# what is changed, in which row, against which row
CONTROL_COMPARISONS = [
    ("decay in all heads", "linear + decay", "linear"),
    ("decay in one of 4 heads, span 4 tokens", "linear one short head", "linear"),
    ("a token shift: half of each token is the one before", "linear token shift", "linear"),
    ("token shift: with decay", "linear token shift + decay", "linear token shift"),
    ("no rotary embedding", "linear no rotation", "linear"),
    ("no rotary embedding: with decay", "linear no rotation + decay", "linear no rotation"),
    ("decay", "softmax + decay", "softmax"),
    ("a token shift", "softmax token shift", "softmax"),
    ("a norm", "softmax norm", "softmax"),
    ("a norm: 2 heads", "softmax 2 heads norm", "softmax 2 heads"),
    ("a norm that starts at 0.2: 2 heads", "softmax 2 heads small norm", "softmax 2 heads"),
    ("the norm of diff", "diff", "diff no norm"),
    ("the norm of diff, starting at 0.2", "diff small norm", "diff no norm"),
    ("the difference and its factor, norms start at 0.2",
     "diff small norm", "softmax 2 heads small norm"),
    ("Diff, its norm starts at 0.2", "diff small norm", "softmax"),
    ("a norm, large embedding: 2 heads",
     "softmax 2 heads norm large embedding", "softmax 2 heads large embedding"),
    ("the norm of diff, large embedding", "diff large embedding", "diff no norm large embedding"),
    ("the difference and its factor, large embedding",
     "diff large embedding", "softmax 2 heads norm large embedding"),
    ("Diff, large embedding", "diff large embedding", "softmax large embedding"),
    ("a large embedding", "softmax large embedding", "softmax"),
    ("a large embedding: 2 heads", "softmax 2 heads large embedding", "softmax 2 heads"),
    ("a large embedding: 2 heads, norm",
     "softmax 2 heads norm large embedding", "softmax 2 heads norm"),
    ("a large embedding in diff", "diff large embedding", "diff"),
    ("a large embedding in diff, no norm", "diff no norm large embedding", "diff no norm"),
    ("DIFF V2", "diff_v2 narrow", "softmax"),
    ("DIFF V2, rows sum to 1", "diff_v2 narrow minus matched", "softmax"),
    ("a plus, rows sum to 1", "diff_v2 narrow plus matched", "softmax"),
    ("minus instead of plus", "diff_v2 narrow minus matched", "diff_v2 narrow plus matched"),
]


def row_name(arm, decay):
    return f"{arm} + decay" if decay else arm


def fill_in(own, flags):
    """A row's flags with the width of an MLP that pays for second queries in place of {narrow}."""
    config = train.parse([*flags, "--preset=toy"])[0]  # --n_embd may be given
    narrow = matched_width(config.n_embd, config.n_head)
    return ["--preset=toy", *(flag.format(narrow=narrow) for flag in own)]


def rows_of_arms(flags):
    """The 22 rows of the first part: each arm without and with decay."""
    rows = {}
    for decay in (False, True):
        for arm, own in ARMS.items():
            # also where it is the default, so that nobody can give the other one to all rows
            mask = "--decay" if decay else "--no-decay"
            rows[row_name(arm, decay)] = fill_in([*own, mask], flags)
    return rows


def rows_of_controls(flags):
    """The rows of the second part, and those of the first that they are compared with."""
    arms = rows_of_arms(flags)
    # the same names and flags make the same folders, so nothing is trained twice
    rows = {name: arms[name] for name in BESIDE_CONTROLS}
    for name, own in CONTROLS.items():
        rows[name] = fill_in(own, flags)
    return rows


def differences_table(noise):
    """What each comparison comes to, and then what decay does to each arm."""
    table = []
    for what, arm, base in COMPARISONS:
        found = {"comparison": what, "of": f"{arm} − {base}"}
        for decay in (False, True):
            column = "with decay" if decay else "without decay"
            pair = row_name(arm, decay), row_name(base, decay)
            found[column] = noise.difference(*pair)
        if found["without decay"] or found["with decay"]:  # else the arms are not there yet
            table.append(found)
    of_decay = []
    for arm in ARMS:
        found = noise.difference(row_name(arm, True), row_name(arm, False))
        if found:
            of_decay.append({"arm": arm, "decay − no decay": found})
    table = pd.DataFrame(table, columns=["comparison", "of", "without decay", "with decay"])
    return table, pd.DataFrame(of_decay, columns=["arm", "decay − no decay"])


def finding(noise):
    """The title of the first figure: what decay does to the gap of linear attention."""
    gaps = []
    for decay, words in ((False, "without decay"), (True, "with decay")):
        gap = noise.difference(row_name("linear", decay), row_name("softmax", decay))
        if gap:
            gaps.append(f"{gap.mean:+.3f} {words}")
    return f"Linear attention's gap to softmax: {', '.join(gaps) or 'not known yet'}"


def draw_losses(noise, unit):
    """A row for each arm and a dot for each run. Where the losses fall into clusters that are far
    from each other, the empty space between them is cut out."""
    arms = {row_name(arm, decay): arm for arm in ARMS for decay in (False, True)}
    labels = noise.runs["row"].map(arms).str.replace("diff_v2 narrow", "DIFF V2")
    dots = noise.runs.assign(arm=labels)
    # both conditions of an arm share its line of the figure
    dots["mask"] = dots["decay"].map({False: "no decay", True: "decay"})
    dots = dots.sort_values("decay", kind="stable")  # the first condition is drawn hollow
    losses = dots["loss"].dropna().sort_values().to_numpy()
    if not len(losses):
        raise ValueError("every row has a run that diverged: there is nothing to show")
    # where to cut: at a gap of 0.2 nats or more that takes up much of the figure
    gaps = np.diff(losses)
    clusters = np.split(losses, np.flatnonzero(gaps > max(0.2, 0.4 * np.ptp(losses))) + 1)
    errors = [noise.mean(row).error for row in dots["row"].unique()]
    margin = max(0.02, np.nan_to_num(errors).max())  # the bars have to fit as well
    widths = [cluster[-1] - cluster[0] + 2 * margin for cluster in clusters]
    figure, axes = report.new_figure(
        columns=len(clusters), size=(11, 7), sharey=True, width_ratios=widths)
    for ax, cluster in zip(axes, clusters):
        report.dot_plot(ax, dots, "loss", row="arm", condition="mask", pool="pool")
        ax.set_xlim(cluster[0] - margin, cluster[-1] + margin)
        ax.locator_params(axis="x", nbins=5)
    for ax in axes[1:]:
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="y", length=0)
    label = f"val loss, {unit}, left: better (dots: runs; bars: 95 % intervals of the means)"
    if len(clusters) > 1:
        label += ". The axis is cut"
    figure.supxlabel(label, fontsize=report.LOOK["font.size"])
    return figure


def controls_finding(noise):
    """The title of the second figure: which share of decay's gain two simple parts of it have."""
    of_decay = noise.difference("linear + decay", "linear")
    of_head = noise.difference("linear one short head", "linear")
    of_shift = noise.difference("linear token shift", "linear")
    if not (of_decay and of_head and of_shift and of_decay.mean < 0):
        return "What decay brings to linear attention"
    head = of_head.mean / of_decay.mean
    shift = of_shift.mean / of_decay.mean
    return ("Of what decay brings to linear attention, one head of span 4 brings "
            f"{head:.0%}, a token shift {shift:.0%}")


def controls_table(noise):
    table = []
    for what, arm, base in CONTROL_COMPARISONS:
        found = noise.difference(arm, base)
        if found:
            pair = f"{arm} − {base}"
            table.append({"what is changed": what, "of": pair, "difference": found})
    return pd.DataFrame(table, columns=["what is changed", "of", "difference"])


def draw_controls(table, unit):
    """What each change of plain linear attention brings. The other changes are in the table."""
    figure, (ax,) = report.new_figure(size=(11, 3.9))
    table = table[table["of"].str.endswith("− linear")].reset_index(drop=True)
    grid.draw_differences(ax, table, "what is changed", {"difference": (True, 0)}, limit=1)
    ax.set_xlim(-0.8, 0.5)
    ax.set(xlabel=f"change of linear attention's val loss, {unit}\n"
                  "(left: better; bars: 95 % intervals; 0: linear attention without decay)")
    return figure


def publish(result, args):
    """Tables and figure of the first part, or with --controls of the second."""
    runs = result.runs.assign(pool=bench.noise_pools(result.runs))
    noise = report.Noise(grid.without_diverged(runs))
    unit = bench.unit(runs)
    tables = {f"Final val loss, {unit}": grid.losses_table(runs, noise)}
    if args.controls:
        differences = controls_table(noise)
        tables[f"Differences of two rows, {unit}"] = differences
        figure = draw_controls(differences, unit)
        report.add_title(figure, controls_finding(noise))
    else:
        differences, decay = differences_table(noise)
        tables[f"Differences of two arms, {unit}"] = differences
        tables[f"What decay does, {unit}"] = decay
        figure = draw_losses(noise, unit)
        report.add_title(figure, finding(noise))
    name = "controls" if args.controls else "toy"
    about = result.about | noise.sentences()
    report.publish(args.out, name, about, tables | result.rates, figure, result.every_run)


def main(argv=None):
    p = grid.parser("python -m experiments.toy", __doc__, "out/toy", SEEDS, RATES, CHOOSE_ON)
    p.add_argument("--controls", action="store_true",
                   help="the second part: what it is that decay brings, and a plus for the minus")
    args, flags = p.parse_known_args(argv)
    register()  # before the flags are read: train.py refuses an arm that it does not know
    rows = rows_of_controls(flags) if args.controls else rows_of_arms(flags)
    result = grid.train_and_collect(rows, args, flags)
    publish(result, args)


if __name__ == "__main__":
    grid.command_line("experiments.toy", main)
