"""
Compares runs, and times the attentions. Each verb prints Markdown tables and writes them, the
numbers behind them and a figure to <out>/<verb>.md, .json and .png.

    python bench.py loss        # the runs below out/: final losses with 95 % intervals, and curves
    python bench.py speed       # attention alone and the training step, by length of context
    python bench.py decode      # one token of the sampler, by length of context

`python bench.py <verb> --help` says what is measured. Its "Table 7" is one of arXiv 2410.05258.
"""
import argparse
import inspect
import itertools
import math
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch.utils.benchmark import Timer

import report
import train
from flags import comma_list, positive_int
from model import ATTENTION, GPT, KERNELS, GPTConfig, Softmax
from model import next_token, open_device, pick_kernel, round_to_bf16
from report import MeanError

# what a result is quoted with. Where its runs differ, all values are there
CONDITIONS = ["device_name", "torch", "dtype", "data", "steps", "total_batch", "date"]
SETTINGS = list(dict.fromkeys([*train.IDENTITY, "parameters", *CONDITIONS]))
DESCRIPTION = [*SETTINGS, "status", "tokens", "loss", "tok_per_s"]


# runs, also those of experiments/


def describe_run(head, records):
    """A run of train.py as a row, from its log: DESCRIPTION.

    status: "finished", "diverged: ..." or "stopped at step ...". loss: the final val loss, NaN
    where a run has not finished. tok_per_s: the median.
    """
    last = records[-1] if records else dict(step=0)
    row = {name: head.get(name) for name in SETTINGS}
    for record in records:
        # a run may resume on another card, which is then a condition of its result as well
        for name, value in record.get("resumed", {}).items():
            if name in CONDITIONS:
                row[name] = f"{row[name]}, then {value}"
    row["status"] = f"stopped at step {last['step']:,} of {head['steps']:,}"
    row["tokens"] = last.get("tokens")
    row["loss"] = math.nan
    speeds = [record["tok_per_s"] for record in records if record.get("tok_per_s")]
    row["tok_per_s"] = float(np.median(speeds)) if speeds else math.nan
    if last["step"] == head["steps"] and "val_loss" in last:
        row["status"] = "finished"
        row["loss"] = last["val_loss"]
    elif "not_finite" in last:
        row["status"] = f"diverged: {last['not_finite']}"
    return row


def conditions_of_runs(runs):
    """What the runs were made with, for publish's about."""
    return {name: ", ".join(map(str, runs[name].unique())) for name in CONDITIONS}


def without_diverged(runs, by="row"):
    """The runs of the rows in which no run diverged. Any other row has no mean to be compared.

    The mean of the runs that are left would be that of the survivors, which may be the better ones.
    by: the column that names a run's row.
    """
    diverged = runs[by][runs["status"].str.startswith("diverged")]
    return runs[~runs[by].isin(diverged)]


def noise_pools(runs):
    """The column `pool` of report.Noise: which runs share a standard deviation."""
    # without decay the runs of the toy differ more by seed than with it
    decay = runs["decay"].astype(bool)
    if decay.nunique() == 1:
        return decay.map(lambda _: "all rows")
    return decay.map({True: "rows with decay", False: "rows without decay"})


def unit(runs):
    return "nats per byte" if set(runs["tokenizer"]) == {"bytes"} else "nats per token"


def in_words(field, value):
    """A setting as the name of an arm says it: "no decay", "lr4e-3"."""
    if isinstance(value, bool):
        return field if value else f"no {field}"
    return train.run_name_part(field, value)


def arm_names(runs):
    """What tells the runs (dicts) apart except for their seeds: "diff no subln lr4e-3" for each."""
    names = [[run["attn"]] for run in runs]
    for field in train.IDENTITY:
        values = [run.get(field) for run in runs]
        if field in ("attn", "seed") or len(set(map(repr, values))) == 1:
            continue
        for name, value in zip(names, values):
            if value is not None:
                name.append(in_words(field, value)[:24])
    return [" ".join(name) for name in names]


# loss


def read_runs(folders):
    """The runs below the folders, as three data frames.

    runs: a row for each run. The column `arm` is its name without the seed. evals: a row for each
    evaluation. others: a row for each folder that is left out, and the reason: its log is broken,
    its run is not finished, or another folder has the same run. Raises ValueError if there is none.
    """
    rows = []
    evals = []
    others = []
    for log in sorted({log for folder in folders for log in folder.rglob("log.jsonl")}):
        try:
            head, records = train.read_log(log)
        except ValueError as e:
            others.append(dict(run=str(log.parent), status=str(e)))
            continue
        head = asdict(GPTConfig()) | head  # an old log lacks the fields that came later
        of_run = dict(run=str(log.parent), seed=head["seed"])
        rows.append(describe_run(head, records) | of_run)
        evals += [record | of_run for record in records if "val_loss" in record]
    if not rows:
        command = "python train.py --attn=softmax,diff --seed=1,2"
        where = ", ".join(map(str, folders))
        raise ValueError(f"there are no runs below {where}: `{command}` makes some")

    runs = pd.DataFrame(rows).assign(arm=arm_names(rows))
    runs["but for the rate"] = arm_names([row | dict(lr=None) for row in rows])
    # of two folders with the same run the finished one counts
    runs = runs.sort_values("loss", key=pd.Series.isna, kind="stable")
    again = runs.duplicated(["arm", "seed"])
    runs.loc[again, "status"] = "another folder has the same run"
    others += runs.loc[runs["status"] != "finished", ["run", "status"]].to_dict("records")
    order = {attn: i for i, attn in enumerate(ATTENTION)}
    runs = runs[~again].sort_values(["arm", "seed"])
    runs = runs.sort_values("attn", key=lambda attn: attn.map(order), kind="stable")
    runs["pool"] = noise_pools(runs)
    evals = pd.DataFrame(evals, columns=["run", "seed", "tokens", "val_loss"])
    return runs, evals, pd.DataFrame(others)


def softmax_beside(runs, but_for=()):
    """{arm: the softmax arm with the same settings}, for the arms that have one."""
    may_differ = {"attn", "seed", "subln", "subln_init", "lambda_init", *but_for}
    same = [name for name in train.IDENTITY if name not in may_differ]
    settings = runs[same].map(repr).agg(" ".join, axis=1)
    plain = (runs["attn"] == "softmax") & ~runs["subln"].eq(True)  # softmax may have the norm, too
    softmax = dict(zip(settings[plain], runs["arm"][plain]))
    found = {}
    for arm, setting in zip(runs["arm"], settings):
        if softmax.get(setting, arm) != arm:
            found[arm] = softmax[setting]
    return found


def summarize(runs, beside):
    """A table with a row for each arm, and the sentences of the noise behind its intervals.
    beside: {arm: the arm that it is compared to}. An arm with a run that diverged has no mean."""
    noise = report.Noise(without_diverged(runs.assign(row=runs["arm"])))
    table = []
    for arm, group in runs.groupby("arm", sort=False):
        found = {"arm": arm, "n": int(group["loss"].count())}
        found["diverged"] = int(group["status"].str.startswith("diverged").sum())
        found["val loss"] = noise.mean(arm)
        found["− softmax"] = noise.difference(arm, beside[arm]) if arm in beside else None
        found["tokens"] = group["tokens"].max()
        found["tok/s"] = group["tok_per_s"].median()
        table.append(found)
    return pd.DataFrame(table), noise.sentences()


def at_best_rates(runs):
    """The runs of each arm at its best rate, and {arm: that rate in words}. Their arms are named
    without the rate."""
    runs = runs.assign(diverged=runs["status"].str.startswith("diverged"))
    by_rate = runs.groupby(["but for the rate", "lr"], as_index=False)
    rates = by_rate.agg(
        diverged=("diverged", "any"), count=("loss", "count"), mean=("loss", "mean"))
    # the best rate is the one with the lowest mean loss. but a rate at which a run diverged is the
    # worst, and one with fewer seeds is worse: a seed that is missing may have been the bad one
    rates = rates.sort_values(["diverged", "count", "mean"], ascending=[True, False, True])
    best = rates.drop_duplicates("but for the rate")
    words = {}
    for arm, rate in zip(best["but for the rate"], best["lr"]):
        tried = rates["lr"][rates["but for the rate"] == arm]
        at_the_edge = rate in (tried.min(), tried.max())
        words[arm] = f"{rate!r} (at the edge)" if at_the_edge else repr(rate)
    chosen = runs.merge(best[["but for the rate", "lr"]])  # in the order of runs
    return chosen.assign(arm=chosen["but for the rate"]), words


def loss_finding(table):
    """The title of the figure. Two arms are compared. Three or more are only ranked: the lowest may
    be the lowest by chance, and the interval of one difference does not allow for that."""
    finished = table.dropna(subset="val loss").to_dict("records")
    if not finished:
        return "No run is finished"
    # of two arms at most one has a softmax to be compared to: the other one
    compared = [row for row in finished if row["− softmax"] is not None]
    if len(finished) > 2 or not compared:
        finished.sort(key=lambda row: row["val loss"].mean)
        ranks = [f"{row['arm']} {row['val loss'].mean:.3f}" for row in finished]
        order = " from the lowest, a ranking and not a test" if len(ranks) > 1 else ""
        return f"Mean loss{order}: {', '.join(ranks)}"
    row = compared[0]
    mean, error = row["− softmax"]
    where = "below" if mean < 0 else "above"
    if math.isnan(error):
        return f"{row['arm']} is {abs(mean):.3f} {where} softmax, in one run each"
    if abs(mean) < error:
        return f"{row['arm']} and softmax can't be told apart ({mean:.3f} ± {error:.3f})"
    return f"{row['arm']} is {abs(mean):.3f} ± {error:.3f} {where} softmax"


def loss_figure(runs, curves, title, unit):
    """Two panels. The upper one has the curves without the first tenth of the training, the lower
    one the final losses, a dot for each run. An arm with a run that diverged has no dots."""
    rows = 0.5 * runs["arm"].nunique()  # inches
    heights = dict(height_ratios=[4, 1.5 + rows])
    figure, (above, below) = report.new_figure(2, size=(8, 6 + rows), gridspec_kw=heights)
    curves = curves[curves["tokens"] >= curves["tokens"].max() / 10]
    report.line_plot(above, curves, "tokens", "val_loss", by="arm", seed="seed")
    above.set(xscale="log", xlabel="tokens of training", ylabel=f"val loss, {unit}")

    # the axis has to end so low that differences can be seen: above the best loss by twice as much
    # as the runs differ where the curves begin. But no final loss may be cut off
    losses = curves.sort_values("tokens").groupby("run")["val_loss"]
    best = curves["val_loss"].min()
    spread = losses.first().max() - losses.first().min()
    top = max(best + 2 * spread, losses.last().max())
    if top > best:
        above.set_ylim(best - (top - best) / 20, top + (top - best) / 20)
    report.short_numbers(above.xaxis)
    report.label_ends(above)

    # with the intervals of the table
    report.dot_plot(below, without_diverged(runs, by="arm"), "loss", row="arm", pool="pool")
    below.set(xlabel=f"final val loss, {unit}: left is better")
    report.add_title(figure, title)
    return figure


def loss(args):
    """Final losses and curves of the runs below some folders.

    Runs that differ in the seed alone are one arm. The standard deviation of a run is pooled over
    the arms: over those without decay, and over those with it, which differ less by seed.
    Every mean and every difference has a 95 % interval from it (Student's t, Welch's between the
    two pools). An arm with a run that diverged has no mean, because the runs that are left may be
    the better ones. An arm is compared to softmax with the same settings: all of them but those of
    the norm and of lambda.
    Where there are several rates, a second table has each arm at its own best. The figure leaves
    out the fall of the first tenth, which is alike for all.
    """
    runs, evals, others = read_runs(args.runs)
    table, noise = summarize(runs, softmax_beside(runs))
    about = conditions_of_runs(runs) | noise
    tables = {f"Final val loss, {unit(runs)}: mean of n runs, ± half of a 95 % interval": table}
    shown = runs
    how = ""
    if runs["lr"].nunique() > 1:  # one rate for all may suit one arm only
        shown, rates = at_best_rates(runs)
        table, noise = summarize(shown, softmax_beside(shown, but_for=["lr"]))
        table.insert(1, "rate", table["arm"].map(rates))
        about |= {f"{key} at the best rates": text for key, text in noise.items()}
        how = ", each arm at the best of its rates, chosen on these same runs"
        tables[f"Final val loss{how}"] = table
    if len(others):
        tables["Runs that are left out"] = others
    curves = evals.merge(shown[["run", "arm"]])
    figure = loss_figure(shown, curves, loss_finding(table) + how, unit(runs))
    runs = runs.rename(columns={"loss": "val loss", "tok_per_s": "tok/s"})
    report.publish(args.out, "loss", about, tables, figure, runs)


# what speed and decode share


def set_up(args):
    """Fills in the flags that were left open, by the device, and sets PyTorch's switches."""
    args.device = open_device(args.device)
    cuda = args.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(args.device)
    if args.preset is None:
        args.preset = "gpt2" if cuda else "toy"
    if args.dtype is None:
        args.dtype = "bfloat16" if cuda else "float32"
    if args.compile is None:
        args.compile = cuda
    args.autocast = train.autocast(args)
    torch.set_float32_matmul_precision("high")  # as in train.py
    # this one process compiles many sizes of the same few functions, and 8 are the limit
    torch._dynamo.config.recompile_limit = 1000


def size_of(preset):
    """GPTConfig's fields for the size of a preset."""
    size = {name: train.PRESETS[preset][name] for name in ("n_layer", "n_head", "n_embd")}
    return size | dict(vocab_size=50257 if preset == "gpt2" else 257)


def arms_and_kernels(args):
    """{label: (attn, kernel)} of what is timed. The linear arms have no kernel to choose."""
    found = {}
    for attn in args.arms:
        kernels = args.kernel if issubclass(ATTENTION[attn], Softmax) else ["auto"]
        for kernel in kernels:
            label = attn if kernel == "auto" else f"{attn} {kernel}"
            found[label] = (attn, kernel)
    return found


def build_model(args, attn, kernel, **config):
    """A model on the device, and the name of its kernel. ValueError if the kernel can't run."""
    model = GPT(GPTConfig(attn=attn, decay=args.decay, **config)).to(args.device)
    used, _ = pick_kernel(model, kernel, getattr(torch, args.dtype))
    return model, used or "chunks"


def time_interleaved(builders, repeats, enough=0.03):
    """Times functions in turn, round by round, so that a slow minute slows all of them.

    builders: {arm: build}. build() returns {what: function} and a dict of facts. In each round a
    function is called so often that it takes about `enough` seconds. Returns {arm: facts, or
    {"failed": why}} and {(arm, what): seconds of a call in each round}.
    """
    facts = {}
    timers = {}  # {(arm, what): (timer, calls in a round)}
    for arm, build in builders.items():
        try:
            functions, facts[arm] = build()
            found = {}
            for what, function in functions.items():
                timer = Timer("f()", globals=dict(f=function), num_threads=torch.get_num_threads())
                once = timer.timeit(1).median  # after two calls, which compile and warm up
                found[arm, what] = (timer, max(1, round(enough / once)))
            timers |= found
        except Exception as e:  # of many classes, it depends on what the machine lacks
            reason = str(e).splitlines() or [type(e).__name__]
            facts[arm] = {"failed": reason[0]}
    seconds = {case: [] for case in timers}
    for _ in range(repeats):
        for case, (timer, calls) in timers.items():
            seconds[case].append(timer.timeit(calls).median)
    return facts, {case: np.array(values) for case, values in seconds.items()}


STATE = "bytes of state a sequence"  # the name of a column of decode's tables


def median_and_spread(values):
    """The median, and half the distance between the quartiles."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return MeanError(middle, (high - low) / 2)


class Case(NamedTuple):
    """What is timed of every arm, side by side."""

    part: str  # the table and the panel that it belongs to
    build: Callable  # build(args, attn, kernel, B, T), see time_interleaved
    B: int  # sequences
    T: int  # tokens of each
    tokens: int  # that one call deals with


def time_arms(args, case):
    """Times a case. Returns the rows of a table, one for each arm, and a row for each timing."""
    arms = arms_and_kernels(args)
    first = next(iter(arms))
    builders = {arm: partial(case.build, args, *arms[arm], case.B, case.T) for arm in arms}
    facts, seconds = time_interleaved(builders, args.repeats)
    size = dict(part=case.part, T=case.T, sequences=case.B)
    rows = {arm: size | dict(arm=arm) | facts[arm] for arm in arms}
    timings = []
    for (arm, what), values in seconds.items():
        rows[arm][f"{what}, tokens/s"] = case.tokens / float(np.median(values))
        beside = seconds.get((first, what), math.nan)
        rows[arm][f"{what}, × {first}"] = median_and_spread(beside / values)
        if what == "recompute":
            rows[arm]["step, × recompute"] = median_and_spread(values / seconds[arm, "step"])
        for number, value in enumerate(values.tolist(), 1):
            timing = dict(part=case.part, T=case.T, arm=arm, what=what, round=number, seconds=value)
            timings.append(timing | {"tokens/s": case.tokens / value})
    return list(rows.values()), timings


def publish_timings(args, name, cases):
    """Times the cases, and publishes a table and a panel for each of their parts.
    Raises ValueError if there is nothing but failures. What was published before stays then."""
    rows = []
    timings = []
    for case in cases:
        found, rounds = time_arms(args, case)
        rows += found
        timings += rounds
    if not timings:
        raise ValueError(f"nothing could be timed: {rows[0]['failed']}")
    timings = pd.DataFrame(timings)

    how = "medians over the rounds; × compares within a round, ± half the quartiles' distance"
    tables = {}
    # an arm that failed has a row, too, which says why
    for part in dict.fromkeys(row["part"] for row in rows):
        table = pd.DataFrame([row for row in rows if row["part"] == part])
        tables[f"{part.capitalize()} ({how})"] = table.drop(columns="part")

    first = next(iter(arms_and_kernels(args)))
    figure = draw_timings(timings, pd.DataFrame(rows), first)
    about = report.conditions(args.device, dtype=args.dtype, compiled=args.compile)
    about |= size_of(args.preset) | dict(decay=args.decay, rounds=args.repeats)
    report.publish(args.out, name, about, tables, figure, timings)


def draw_timings(timings, facts, first):
    """A panel for each part of the timings, and one for the bytes of state if they were measured.

    facts: the rows of the tables. first: the arm to which the fastest one is compared."""
    parts = timings["part"].unique()
    panels = len(parts) + (STATE in facts)
    figure, axes = report.new_figure(columns=panels, size=(6.5 * panels, 5))
    best = {}  # by length: the arms that are fastest in one of the parts
    for ax, part in zip(axes, parts):
        rounds = timings[timings["part"] == part]
        # only what is timed first: the forward part and the recomputing are in the table
        rounds = rounds[rounds["what"] == rounds["what"].iloc[0]]
        draw_speeds(ax, rounds)
        lengths = sorted({rounds["T"].min(), rounds["T"].max()})
        winners = {T: fastest(rounds, first, T) for T in lengths}
        words = ", ".join(f"at {T:,} {winner}" for T, winner in winners.items())
        ax.set_title(f"{part}. Fastest:\n{words}")
        for T in lengths:
            arm = fastest_arm(rounds, T)
            arms = best.setdefault(T, [])
            if arm not in arms:
                arms.append(arm)
    if STATE in facts:
        draw_state(axes[-1], facts.dropna(subset=[STATE]).drop_duplicates(["arm", "T"]), first)
    words = ", ".join(f"at {T:,} tokens {' or '.join(arms)}" for T, arms in best.items())
    report.add_title(figure, f"Fastest: {words}")
    return figure


def draw_speeds(ax, rounds):
    """Median tokens per second over T on logarithmic axes, with the quartiles shaded."""
    groups = rounds.groupby(["arm", "T"], sort=False)["tokens/s"]
    lines = groups.median().to_frame("tokens/s")
    lines["low"] = groups.quantile(0.25)
    lines["high"] = groups.quantile(0.75)
    report.line_plot(ax, lines.reset_index(), "T", "tokens/s", by="arm", band=("low", "high"))
    ax.set(ylabel="tokens per second\n(shaded: the middle half of the rounds)")
    finish_by_length(ax, rounds["T"])


def draw_state(ax, facts, first):
    """The bytes of a sequence's state over T."""
    report.line_plot(ax, facts, "T", STATE, by="arm")
    longest = facts["T"].max()
    sizes = facts[facts["T"] == longest].set_index("arm")[STATE]
    least = sizes[sizes == sizes.min()].index
    smallest = " and ".join(least)
    if first in sizes and first not in least:
        smallest += f" (1/{sizes[first] / sizes.min():.0f} of {first}'s)"
    ax.set(title="state: what is kept of the context of a sequence.\n"
                 f"Smallest: at {longest:,} {smallest}", ylabel="bytes")
    finish_by_length(ax, facts["T"])


def finish_by_length(ax, lengths):
    """Makes both axes logarithmic, with a tick for each length, and names the lines."""
    ax.set(xscale="log", yscale="log", xlabel="tokens of context")
    lengths = sorted(lengths.unique())
    ax.set_xticks(lengths, [f"{T:,}" for T in lengths])
    ax.set_xticks([], minor=True)
    report.short_numbers(ax.yaxis)
    report.label_ends(ax)


def fastest_arm(rounds, T):
    """The arm with the largest median of tokens per second at T tokens."""
    return rounds[rounds["T"] == T].groupby("arm")["tokens/s"].median().idxmax()


def fastest(rounds, first, T):
    """In words: the fastest arm at T tokens, and how many times as fast as `first` it is."""
    arm = fastest_arm(rounds, T)
    at_T = rounds[rounds["T"] == T]
    speeds = at_T.pivot(index="round", columns="arm", values="tokens/s")
    # an arm that failed has no timings
    if arm == first or first not in speeds:
        return arm
    # as in the table: a slow round slows both, so compare within it and take the median then
    times = (speeds[arm] / speeds[first]).median()
    return f"{arm} ({times:.1f} × {first})"


# speed


def build_attention(args, attn, kernel, B, T):
    """What is timed of attention alone: from projected q, k and v to A V, and back."""
    config = size_of(args.preset) | dict(n_layer=1, vocab_size=64, block_size=T)
    model, used = build_model(args, attn, kernel, **config)
    layer = model.blocks[0].attn
    rope = model.rope_from(0, T)
    x = torch.randn(B, T, model.config.n_embd, device=args.device)
    with args.autocast:
        q, k, v, lam = layer.project(x)
    # cut off from the projections, so that their gradients are no part of it
    inputs = [y.detach().requires_grad_() for y in (q, k, v)]
    if lam is not None:
        lam = lam.detach().requires_grad_()
    fast = torch.compile(layer.fast, dynamic=False) if args.compile else layer.fast

    def forward():
        with torch.no_grad(), args.autocast:
            fast(*inputs, lam, rope)

    def forward_and_backward():
        with args.autocast:
            y = fast(*inputs, lam, rope)
        sources = inputs if lam is None else [*inputs, lam]
        torch.autograd.grad(y, sources, torch.ones_like(y))

    functions = {"forward + backward": forward_and_backward, "forward": forward}
    return functions, dict(kernel=used)


def build_training_step(args, attn, kernel, B, T):
    """What is timed of training: a whole step, and the forward part of it."""
    model, used = build_model(args, attn, kernel, block_size=T, **size_of(args.preset))
    optimizer = train.make_optimizer(model, lr=1e-4, weight_decay=0.1)
    tokens = torch.randint(model.config.vocab_size, (B, T + 1), device=args.device)
    idx = tokens[:, :-1]
    targets = tokens[:, 1:]
    run = torch.compile(model, dynamic=False) if args.compile else model

    def forward():
        with torch.no_grad(), args.autocast:
            run(idx, targets)

    def step():
        with args.autocast:
            _, loss = run(idx, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return {"step": step, "forward": forward}, dict(kernel=used)


def speed(args):
    """Tokens per second of attention alone and of the training step (Table 7 of the paper).

    Attention alone is A V from projected q, k and v. The training step is a whole one: forward,
    backward, clipping, AdamW. A call has the same number of tokens at every length,
    --batch_size times the preset's block_size, but at least one sequence. The arms are timed in
    turn, in --repeats rounds, so that a slow minute slows all of them. Each is compared to the
    first one in the same round.
    """
    set_up(args)
    preset = train.PRESETS[args.preset]
    tokens = (args.batch_size or preset["batch_size"]) * preset["block_size"]
    lengths = args.T
    if lengths is None:
        lengths = [1024, 4096, 16384] if args.device.type == "cuda" else [256, 1024, 4096]
    cases = []
    parts = {"attention alone": build_attention, "a training step": build_training_step}
    for part, build in parts.items():
        for T in lengths:
            B = max(1, tokens // T)
            cases.append(Case(part, build, B, T, tokens=B * T))
    publish_timings(args, "speed", cases)


# decode


def build_decoding(args, attn, kernel, B, T):
    """What is timed of the sampler: a greedy step for B sequences, over the last tokens before T.
    For one sequence also a run of the whole context through the model."""
    model, used = build_model(args, attn, kernel, block_size=T, **size_of(args.preset))
    if args.dtype == "bfloat16":
        # as in sample.py: autocast would cast the weights anew for every token
        round_to_bf16(model)
    run_step = model.step
    run_whole = model
    if args.compile:
        # both, or the ratio of the two would be that of compiled to eager. reduce-overhead: with
        # CUDA graphs, as in sample.py. Not dynamic: each length is compiled for itself
        options = dict(mode="reduce-overhead", dynamic=False)
        run_step = torch.compile(model.step, fullgraph=True, **options)
        run_whole = torch.compile(model, **options)
    context = torch.zeros(B, T, dtype=torch.int64, device=args.device)  # any token takes as long
    with torch.inference_mode(), args.autocast:
        _, state = model.prefill(context[:, :1])
    room = min(64, T)
    steps = itertools.count()

    def step():
        with torch.inference_mode(), args.autocast:
            if next(steps) % room == 0:
                state["length"].fill_(T - room)  # the context was full: back by some tokens
            logits = run_step(context[:, :1], state)
            return next_token(logits[:, -1], temperature=0)

    def recompute():
        with torch.inference_mode(), args.autocast:
            logits, _ = run_whole(context)
            return next_token(logits[:, -1], temperature=0)

    state_bytes = sum(tensor.nbytes for layer in state["layers"] for tensor in layer.values())
    functions = {"step": step}
    if B == 1:
        functions["recompute"] = recompute
    return functions, {"kernel": used, STATE: state_bytes // B}


def decode(args):
    """Tokens per second and bytes of state of the sampler, by the length of its context.

    A step takes the likeliest token for --num_samples sequences at once. The steps that are timed
    are the last ones before the context is full. For one sequence, a step is also compared to
    running the whole context through the model for every token, which is how nanoGPT samples.
    """
    set_up(args)
    lengths = args.T
    if lengths is None:
        lengths = [1024, 8192] if args.device.type == "cuda" else [64, 256, 1024, 4096]
    cases = []
    for B in args.num_samples:
        part = f"sampling {B} sequences at once" if B > 1 else "sampling one sequence"
        for T in lengths:
            cases.append(Case(part, build_decoding, B, T, tokens=B))
    publish_timings(args, "decode", cases)


# flags


def add_timing_flags(p):
    """The flags that speed and decode share."""
    whole_numbers = comma_list(positive_int)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    switch = argparse.BooleanOptionalAction
    p.add_argument("--arms", type=comma_list(train.arm), default=list(ATTENTION),
                   help="comma list of arms; the others are compared to the first (all)")
    p.add_argument("--kernel", type=comma_list(kernel_name), default=["auto"],
                   help=f"comma list, for softmax and diff: auto, {', '.join(KERNELS)} (auto)")
    p.add_argument("--decay", action=switch, default=False, help="let heads forget (off)")
    p.add_argument("--T", type=whole_numbers,
                   help="comma list of lengths in tokens (1024 and more on cuda, less on a CPU)")
    p.add_argument("--repeats", type=positive_int, default=7, help="rounds (%(default)s)")
    p.add_argument("--preset", choices=train.PRESETS,
                   help="the preset of train.py with the model's size (gpt2 on cuda, else toy)")
    p.add_argument("--device", default=default, help="cuda, cuda:1, cpu (%(default)s)")
    p.add_argument("--dtype", choices=["float32", "bfloat16"],
                   help="precision of the matrix products (bfloat16 on cuda, else float32)")
    p.add_argument("--compile", action=switch, help="use torch.compile (on cuda)")


def kernel_name(text):
    """The type of a flag: auto, or the name of a kernel."""
    if text not in ("auto", *KERNELS):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of auto, {', '.join(KERNELS)}")
    return text


def add_verb(verbs, function, out="out/bench"):
    """The parser of a verb, with the flag that all verbs have. Its help is the docstring."""
    text = inspect.getdoc(function)
    # short, so that what is wrong with a flag is not lost below a list of all flags
    usage = "%(prog)s [--flag=value ...]    (--help lists the flags)"
    p = verbs.add_parser(function.__name__, usage=usage, help=text.splitlines()[0],
                         description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.set_defaults(verb=function)
    p.add_argument("--out", type=Path, default=Path(out),
                   help="folder of the results (%(default)s)")
    return p


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True, metavar="verb")
    p = add_verb(verbs, loss)
    p.add_argument("runs", nargs="*", type=Path, default=[Path("out")],
                   help="folders. All runs below them are read (out)")
    p = add_verb(verbs, speed)
    add_timing_flags(p)
    p.add_argument("--batch_size", type=positive_int,
                   help="sequences in a call, if they are as long as the preset's block_size (the "
                        "preset's)")
    p = add_verb(verbs, decode)
    add_timing_flags(p)
    p.add_argument("--num_samples", type=comma_list(positive_int), default=[1, 8, 64],
                   help="comma list: sequences at once (1,8,64)")
    args = parser.parse_args(argv)
    report.check_can_publish(args.out)  # now, and not after hours of timing
    args.verb(args)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ImportError) as e:
        sys.exit(f"bench.py: {e}")
