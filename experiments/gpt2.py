"""
What does the difference of two maps gain at the size of GPT-2? This plan was fixed before any run.

    python -m experiments.gpt2 --only=Q1      # does it work? four arms: half of the runs
    python -m experiments.gpt2                # and does it rescue linear attention? all eight arms
    python -m experiments.gpt2 --minutes=5    # every arm trains for five minutes. No claims
    python -m experiments.gpt2 --publish      # tables and figure of what is there by now

Stop it whenever you like, the same command goes on. To use several cards, start the same command
once for each of them, with another CUDA_VISIBLE_DEVICES. All other flags are train.py's. With
`--preset=toy --n_layer=1 --n_embd=32 --eval_tokens=2048 --steps=8` the whole plan takes a minute on
a CPU, so that everything can be tried before it costs something. Its verdicts then mean nothing.

All of it is at least 48 runs of 2.8e9 tokens, and Q1 is 24 of them. We have not measured how long
a run takes. We expect some hours of an H100 each, so days for all of them. The program first says
how many runs there are. Then it trains each arm for a few steps, and from their speed it says how
many hours are left.

The plan

- Model and data: the preset gpt2, on FineWeb-Edu, for less than one epoch. A seed decides the
  first weights and the order of the data. The order is the same for all arms.
- Q1, does it work? The arms are softmax; softmax with half the heads, of which diff has as many;
  diff as in the paper, so with its norm; and the authors' second version with a narrower MLP,
  which gives it the parameters of softmax.
- Q2, does it rescue linear attention? Here all arms have decay. diff_linear stands against linear
  attention with a norm and half the heads. That one has the same parameters (but for lambda), the
  same decay and the same size of the state. Two more arms are there to look at: softmax with half
  the heads, and linear attention with a norm and all of its heads.
- Rates: each arm is trained to the end with the peak rates 0.75e-3, 1.5e-3 and 3e-3 on seed 1. If
  the best one is at an edge, a rate beyond it by a factor of 2 is tried, at most three times. Then
  the arm is trained at its best rate with the seeds 2, 3 and 4. Only these runs are compared,
  because a loss that was chosen for being small is not a fair one.
- A run that diverges is a result of its arm, and the table counts it. It is worse than any other
  run when a rate is chosen. If a run with one of the seeds 2, 3 and 4 diverges, all three
  seeds of its arm are trained at the next best rate. If no rate is left, the arm is not compared.
- What is compared, in nats per token on val: diff and softmax, the second version and softmax,
  diff_linear and linear attention with half the heads. A further comparison gets no verdict: diff
  and softmax with half the heads.
- Intervals: each comparison has a two-sided interval of Student's t at 1 - 0.05 / 3, so at 98.3 %.
  By Bonferroni's inequality, all three then hold at once with 95 %. They count as three even if
  only Q1 is trained. The standard deviation is that of a run around the mean of its arm. It is
  pooled over the compared runs of all arms that are there, those of both questions. When a command
  decides who gets more seeds, it pools over the arms that it trains itself.
- Verdict: the smallest effect that matters is 0.010 nats per token. An interval below -0.010 says
  "gains". If not, one inside of +-0.010 says "no gain that matters". If not, one above 0 says
  "costs". All others say "undecided". Then both arms of the comparison get two more seeds, and
  everything is computed again. This happens once. What is undecided then stays undecided. The
  intervals are not corrected for this second look.

With --minutes, each arm gets as many steps as it makes in that time at its measured speed, without
compilation and evaluations. The rate warms up over a tenth of the steps at most and falls to 0 at
the end of the run. All arms have the preset's peak rate (or --lr) and seed 1 (or those of --seed).
"""
import json
import math

import pandas as pd

import bench
import report
import train
from experiments import grid
from experiments.diff_v2 import matched_width, register
from flags import positive_number

SEEDS = "2,3,4"
CHOOSE_ON = "1"
RATES = "0.75e-3,1.5e-3,3e-3"
MATTERS = 0.010  # nats per token
LEVEL = 1 - 0.05 / 3  # of each of the three intervals, so that all of them hold at once with 95 %

# the second of each pair is what the first one is measured against
PRIMARY = [
    ("diff", "softmax"),
    ("diff_v2 narrow", "softmax"),
    ("diff_linear + decay", "linear half the heads + decay"),
]
SECONDARY = [("diff", "softmax half the heads")]

STEPS_OF_SPEED = 12  # the first of them compiles, and the median leaves it out


def arms(flags):
    """The arms of both questions, as rows of a grid: {"Q1": rows, "Q2": rows}."""
    config = train.parse(flags)[0]
    half = f"--n_head={config.n_head // 2}"
    narrow = f"--mlp_width={matched_width(config.n_embd, config.n_head)}"
    q1 = {
        "softmax": ["--attn=softmax"],
        "softmax half the heads": ["--attn=softmax", half],
        "diff": ["--attn=diff"],
        "diff_v2 narrow": ["--attn=diff_v2", narrow],
    }
    q2 = {
        "linear half the heads + decay": ["--attn=linear", half, "--decay", "--subln"],
        "diff_linear + decay": ["--attn=diff_linear", "--decay"],
        "softmax half the heads + decay": ["--attn=softmax", half, "--decay"],
        "linear + decay": ["--attn=linear", "--decay", "--subln"],
    }
    return {"Q1": q1, "Q2": q2}


# -----------------------------------------------------------------------------
# statistics


def verdict(low, high):
    """What an interval says, in nats per token. NaN (there is only one seed) is undecided."""
    if high < -MATTERS:
        return "gains"
    if -MATTERS < low and high < MATTERS:
        return "no gain that matters"
    if low > 0:
        return "costs"
    return "undecided"


def compare(runs, pairs=PRIMARY, level=LEVEL):
    """A data frame with a row for each pair of arms that are both there.

    Its columns are arm, base, difference (a MeanError whose error is half of the interval) and
    verdict.
    """
    noise = report.Noise(runs)
    found = []
    for arm, base in pairs:
        difference = noise.difference(arm, base, level)
        if difference is not None:
            mean, half = difference
            says = verdict(mean - half, mean + half)
            found.append(dict(arm=arm, base=base, difference=difference, verdict=says))
    return pd.DataFrame(found, columns=["arm", "base", "difference", "verdict"])


# -----------------------------------------------------------------------------
# which runs are trained, and which are compared


def runs_of(row, args):
    runs = grid.read_runs(args.out)
    return runs[runs["row"] == row]


def seeds_if_undecided(args):
    """The seeds of both arms of an undecided comparison: two more than at first."""
    last = max([*args.seed, *args.choose_on])
    return [*args.seed, last + 1, last + 2]


def compared_rate(mine, args):
    """The rate at which an arm is compared, from all of its runs: its best one that never diverged.

    None if it is not known yet, or if no rate is left.
    """
    best, missing = grid.choose_rate(mine, args.rates, args.choose_on)
    if missing:
        return None
    choosing = mine[mine["seed"].isin(args.choose_on)].fillna({"loss": math.inf})
    losses = choosing.groupby("lr")["loss"].mean().sort_values()
    others = losses[losses < math.inf].index
    # a rate is out if one of the runs that would be compared diverged there
    later = mine[mine["seed"].isin(seeds_if_undecided(args))]
    diverged = set(later["lr"][later["loss"].isna()])
    for rate in [best, *others]:
        if rate not in diverged:
            return rate
    return None


def compared_runs(rows, args):
    """The runs that are compared, in the order of the arms. An arm without all of them is left out.

    Otherwise somebody who publishes too early would see a verdict that is not final.
    """
    compared = []
    for row in rows:
        mine = runs_of(row, args)
        mine = mine[mine["lr"] == compared_rate(mine, args)]  # None is no run's rate
        seeds = seeds_if_undecided(args)
        if not set(seeds) <= set(mine["seed"]):
            seeds = args.seed
        if set(seeds) <= set(mine["seed"]):
            compared.append(mine[mine["seed"].isin(seeds)])
    return pd.concat(compared) if compared else grid.read_runs(args.out)[:0]


def train_compared_seeds(rows, seeds, flags, args):
    """Trains the seeds that are compared, at the next best rate where one of them diverged."""
    for row, own in rows.items():
        while True:
            rate = compared_rate(runs_of(row, args), args)
            if rate is None:
                print(f"{row}: a run diverged at every rate, so it is not compared", flush=True)
                break
            runs = grid.run_grid({row: own}, seeds, flags, args.out, [rate])
            if runs["loss"].notna().all():
                break


def follow_the_plan(rows, flags, args):
    """Trains everything that the plan asks for."""
    grid.run_grid(rows, args.seed, flags, args.out, args.rates, args.choose_on)
    train_compared_seeds(rows, args.seed, flags, args)
    compared = compared_runs(rows, args)
    # without the two more seeds. If this was stopped some of them may be there already, and they
    # must not decide whether they are needed
    found = compare(compared[compared["seed"].isin(args.seed)])
    undecided = found[found["verdict"] == "undecided"]
    again = {*undecided["arm"], *undecided["base"]}
    if again:
        print(f"\nundecided, so these get two more seeds: {', '.join(sorted(again))}", flush=True)
    more = {row: own for row, own in rows.items() if row in again}
    train_compared_seeds(more, seeds_if_undecided(args), flags, args)


# -----------------------------------------------------------------------------
# how long it takes


def measure_speeds(rows, flags, out):
    """The tokens per second of each arm, in a run of a few steps.

    These runs stay in <out>/speed, so that the same command finds the same speeds.
    """
    config = train.parse(flags)[0]
    length = f"--steps={STEPS_OF_SPEED}"
    if "tokens" in grid.flag_names(flags):  # train.py takes only one of the two
        length = f"--tokens={STEPS_OF_SPEED * config.total_batch}"
    short = [*flags, length, "--log_every=1", f"--eval_tokens={config.block_size}"]
    runs = grid.run_grid(rows, [1], short, out / "speed")
    return dict(zip(runs["row"], runs["tok_per_s"]))


def runs_left(rows, args):
    """How many runs of each arm are not finished yet. An edge or a divergence adds some later."""
    wanted = len(args.seed)
    if args.rates and len(args.rates) > 1:
        wanted += len(args.rates) * len(args.choose_on)
    finished = grid.read_runs(args.out)["row"].value_counts()
    return {row: max(0, wanted - finished.get(row, 0)) for row in rows}


def with_equal_time(rows, speeds, minutes, flags):
    """The same rows, each with the steps that it makes in this time. ValueError if they are few."""
    config = train.parse(flags)[0]
    timed = {}
    for row, own in rows.items():
        steps = int(60 * minutes * speeds[row] / config.total_batch)
        tokens = steps * config.total_batch
        if tokens < config.eval_tokens:
            # train.py would then evaluate it on fewer tokens than the other arms
            raise ValueError(f"in --minutes={minutes:g} {row} trains on {tokens:,} tokens, less "
                             f"than --eval_tokens={config.eval_tokens}: change one of the two")
        # the preset's warm-up may be longer than such a run, which must have time to come down
        warmup = min(config.warmup, steps // 10)
        timed[row] = [*own, f"--steps={steps}", f"--warmup={warmup}"]
    return timed


def refuse_other_settings(rows, flags, args):
    """ValueError if a run of any arm has other settings than now: all that are there are published.
    """
    if args.minutes:
        # an arm has the steps that its speed says. one without a speed has no runs yet
        runs = grid.read_runs(args.out / "speed")
        speeds = dict(zip(runs["row"], runs["tok_per_s"]))
        measured = {row: own for row, own in rows.items() if row in speeds}
        rows = with_equal_time(measured, speeds, args.minutes, flags)
    grid.refuse_other_settings(rows, flags, grid.read_runs(args.out), args.rates)


def train_all(rows, flags, args):
    left = runs_left(rows, args)
    print(f"{len(rows)} arms, {sum(left.values())} runs are left, or a few more where a best rate "
          "is at an edge, a run diverges or a comparison is undecided", flush=True)
    speeds = measure_speeds(rows, flags, args.out)
    tokens = train.parse(flags)[0].tokens
    seconds = 0
    for row, speed in speeds.items():
        of_a_run = 60 * args.minutes if args.minutes else tokens / speed
        seconds += left[row] * of_a_run
    print(f"\nabout {seconds / 3600:,.2f} hours are left for one process on this machine, "
          "without compilation and evaluations", flush=True)
    if args.minutes:
        timed = with_equal_time(rows, speeds, args.minutes, flags)
        grid.run_grid(timed, args.seed, flags, args.out, args.rates, args.choose_on)
    else:
        follow_the_plan(rows, flags, args)


# -----------------------------------------------------------------------------
# what is published


def bytes_per_token(flags):
    """Bytes per token of the val text that an evaluation predicts. <|endoftext|> has no bytes."""
    config = train.parse(flags)[0]
    data = train.open_data(config)
    T = config.block_size
    wanted = max(1, min(config.eval_tokens, config.tokens) // T)  # as in train.evaluate
    n = min(wanted, data.val.sequences(T))
    total = 0
    for i in range(n):  # and not all at once, because a list of ten million tokens is large
        targets = data.val.sequence(i, T)[1:]
        text = targets[targets != data.enc.eot_token]
        total += len(data.enc.decode_bytes(text.tolist()))
    return total / (n * T)


def per_byte(found, size):
    """A mean in nats per token with its error, in nats per byte."""
    return report.MeanError(found.mean / size, found.error / size)


def arms_table(rows, compared, every_run, size, args):
    """A row for each arm: its flags, its rate, and its loss over the seeds that are compared."""
    noise = report.Noise(compared)
    table = []
    for row, own in rows.items():
        mine = every_run[every_run["row"] == row]
        if mine.empty:
            continue
        found = {"arm": row, "flags": " ".join(own)}
        found["diverged"] = int(mine["loss"].isna().sum())
        table.append(found)
        group = compared[compared["row"] == row]
        if group.empty:  # it is not that far, or a run diverged
            continue
        tried = mine["lr"][mine["seed"].isin(args.choose_on)]
        rate = group["lr"].iloc[0]
        at_edge = tried.nunique() > 1 and rate in (tried.min(), tried.max())
        found["parameters"] = int(group["parameters"].iloc[0])
        found["rate"] = f"{rate:g}" + (", at the edge of those tried" if at_edge else "")
        found["seeds"] = ", ".join(map(str, sorted(group["seed"])))
        found["tokens"] = int(group["tokens"].iloc[0])
        found["tok/s"] = group["tok_per_s"].median()
        found["minutes"] = found["tokens"] / found["tok/s"] / 60
        found["nats per token"] = noise.mean(row)
        found["nats per byte"] = per_byte(noise.mean(row), size)
    return pd.DataFrame(table)


def comparisons_table(found, size):
    """What compare() found, as it is published."""
    return pd.DataFrame({
        "comparison": found["arm"] + " − " + found["base"],
        "nats per token": found["difference"],
        "nats per byte": [per_byte(difference, size) for difference in found["difference"]],
        "verdict": found["verdict"],
    })


def draw_plan(compared, primary):
    """The losses of the arms, and beside them the primary comparisons."""
    figure, (left, right) = report.new_figure(columns=2, size=(16, 5.5))
    report.dot_plot(left, compared, "loss", row="row")
    left.set(xlabel="val loss, nats per token")
    right.axvspan(-MATTERS, MATTERS, color="#E6E6E6", linewidth=0)  # what does not matter
    labels = primary["comparison"].str.replace(" − ", "\n− ") + ":\n" + primary["verdict"]
    labelled = primary.assign(label=labels)
    grid.draw_differences(right, labelled, "label", {"nats per token": (True, 0)})
    right.set(xlabel="difference, nats per token\nleft: the first is better; grey: does not matter")
    title = "A difference of two maps is better than one where its interval is left of the grey"
    report.add_title(figure, title)
    return figure


def publish(rows, size, args):
    """Tables and figure of all runs that are there, not only of the arms that were picked now."""
    every_run = grid.read_runs(args.out)
    every_run = every_run[every_run["row"].isin(list(rows))].drop(columns="head")
    every_run = every_run.assign(loss_per_byte=every_run["loss"] / size)
    if args.minutes:
        compared = grid.reported(rows, args.seed, every_run, args.rates, args.choose_on)
    else:
        compared = compared_runs(rows, args)
    compared = grid.without_diverged(compared)
    if compared.empty:
        raise ValueError(f"no arm below {args.out} is far enough to be published")

    about = bench.conditions_of_runs(compared) | report.Noise(compared).sentences()
    about["bytes per token of val"] = f"{size:.4f}"
    about["±"] = "half of the 95 % interval, or of the one that the caption names"
    arms = arms_table(rows, compared, every_run, size, args)
    if args.minutes:
        title = f"Every arm has trained for {args.minutes:g} minutes"
        figure, (ax,) = report.new_figure(size=(9, 5.5))
        report.dot_plot(ax, compared, "loss", row="row")
        ax.set(xlabel="val loss, nats per token")
        report.add_title(figure, title)
        report.publish(args.out, "gpt2_minutes", about, {title: arms}, figure, every_run)
        return

    if len(args.rates) > 1:
        about["seeds that chose the rates"] = ", ".join(map(str, args.choose_on))
    primary = comparisons_table(compare(compared), size)
    secondary = comparisons_table(compare(compared, SECONDARY, level=0.95), size)
    tables = {
        f"Primary comparisons: the first less the second, {LEVEL:.1%} each": primary,
        "Secondary comparison, 95 %, without a verdict": secondary.drop(columns="verdict"),
        "Final val loss": arms,
        "Val loss by rate, mean over the seeds that chose": grid.rates_table(
            every_run, rows, args.choose_on),
    }
    # where only some of the arms were trained, there may be nothing to compare
    tables = {caption: table for caption, table in tables.items() if len(table)}
    figure = draw_plan(compared, primary)
    report.publish(args.out, "gpt2", about, tables, figure, every_run)


def read_arguments(argv):
    """Our settings, and the flags for train.py."""
    p = grid.parser("python -m experiments.gpt2", __doc__, "out/gpt2", SEEDS, RATES, CHOOSE_ON)
    p.add_argument("--only", choices=["Q1", "Q2"], help="the arms of one question (both)")
    p.add_argument("--minutes", type=positive_number,
                   help="train each arm for this time at one rate, and compare nothing. Then "
                        "--seed is 1 and --out is out/gpt2-minutes, if they are not given")
    args, flags = p.parse_known_args(argv)
    if args.minutes:  # then other defaults are better
        p.set_defaults(seed="1", rates=None, out="out/gpt2-minutes")
        args, flags = p.parse_known_args(argv)
    if "preset" not in grid.flag_names(flags):
        flags = ["--preset=gpt2", *flags]
    return args, flags


def main(argv=None):
    args, flags = read_arguments(argv)
    grid.refuse_shared_seeds(args.seed, args.rates, args.choose_on)
    report.check_can_publish(args.out)
    register()
    questions = arms(flags)
    rows = questions["Q1"] | questions["Q2"]
    timed = ["--steps=1", "--warmup=0"] if args.minutes else []  # these will be each row's own
    whole = {row: [*own, *timed] for row, own in rows.items()}
    grid.refuse_flags_of_rows(whole, flags, args.rates)
    known = args.out / "bytes_per_token.json"  # so that --publish does not need the data
    if not args.publish:
        refuse_other_settings(rows, flags, args)
    if not args.publish or not known.exists():
        known.write_text(json.dumps(bytes_per_token(flags)))  # before hours are spent
    size = json.loads(known.read_text())
    if not args.publish:
        picked = grid.pick(questions[args.only] if args.only else rows, args.rows)
        train_all(picked, flags, args)
    publish(rows, size, args)


if __name__ == "__main__":
    grid.command_line("experiments.gpt2", main)
