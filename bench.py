"""
Compares runs, and times the arms. Each verb prints tables and writes them to <out>/<verb>.md, with
a figure and the data behind both.

    python bench.py loss out    # the runs below out/: final losses with 95 % intervals, and curves
    python bench.py speed       # an attention layer alone and the training step, by length
    python bench.py decode      # one token of the sampler, by length of context

`python bench.py <verb> --help` says what is measured and which flags there are.
"""
import argparse
import inspect
import itertools
import math
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.benchmark import Timer

import report
import train
from data import Shards
from model import ATTENTION, GPT, GPTConfig, make_rope, next_token, pick_device, round_to_bf16
from train import Config, arm, cli, comma_list, positive

# what two runs must share, or their losses are not comparable. The name of an arm says what differs
# from the preset, so two presets must not meet either
SHARED = ["data_sha256", "tokenizer", "vocab_size", "tokens", "eval_tokens", "dtype", "preset"]
# what a result is quoted with
CONDITIONS = ["data", "tokens", "dtype", "device_name", "torch", "date", "commit"]
# what an arm and the softmax that it is compared to need not share
OWN = {"attn", "subln", "subln_init", "lambda_init", "minus_average", "mlp_width"}
OWN |= {"flash", "kernel"}
VOCABULARY = {"toy": 257, "gpt2": 50257}  # the tokenizer's, without opening any data


# loss


def read_run(log):
    """A run of train.py as a dict, from its log: all that its first line says, and how it ended.

    status: "finished", "diverged" or "stopped at step ...". loss: its last val loss, inf if it
    diverged. tok_per_s: the median. curve: a list of (tokens, val_loss).
    """
    head, records = train.read_log(log)
    last = records[-1] if records else dict(step=0)
    status = f"stopped at step {last['step']} of {head['steps']}"
    loss = math.nan
    if any("diverged" in record for record in records):
        status = "diverged"
        loss = math.inf
    elif last["step"] == head["steps"] and "val_loss" in last:
        status = "finished"
        loss = last["val_loss"]
    speeds = [record["tok_per_s"] for record in records if record.get("tok_per_s")]
    speed = float(np.median(speeds)) if speeds else math.nan
    curve = [(record["tokens"], record["val_loss"]) for record in records if "val_loss" in record]
    folder = str(log.parent)
    return head | dict(folder=folder, status=status, loss=loss, tok_per_s=speed, curve=curve)


def read_runs(folders):
    """The runs below the folders, as two data frames: those that count, and those that don't.

    A run that has not ended has no final loss. Of two copies of a run one counts. Raises ValueError
    if there is no run that counts, or if two of them can't be compared.
    """
    import pandas as pd

    logs = sorted({log for folder in folders for log in Path(folder).rglob("log.jsonl")})
    if not logs:
        where = ", ".join(map(str, folders))
        command = "python train.py --attn=softmax,diff --seed=1,2"
        raise ValueError(f"there are no runs below {where}: `{command}` makes some")
    # in the order of ATTENTION, which the colours have too
    order = {name: i for i, name in enumerate(ATTENTION)}
    rows = [read_run(log) for log in logs]
    rows.sort(key=lambda row: (order.get(row["attn"], len(order)), row["arm"], row["seed"]))

    runs = pd.DataFrame(rows, dtype=object)  # so that None stays None, which is equal to itself
    runs = runs.astype(dict(lr=float, loss=float, tok_per_s=float))
    ended = runs["status"].isin(["finished", "diverged"])
    again = runs[ended].duplicated(["arm", "lr", "seed"]).reindex(runs.index, fill_value=False)
    runs.loc[again, "status"] = "another folder has the same run"
    others = runs[~ended | again]
    runs = runs[ended & ~again]
    if runs.empty:
        one = others.iloc[0]
        raise ValueError(f"no run is finished: {one['folder']} {one['status']}")
    refuse_to_compare(runs)
    return runs.assign(arm=short_names(runs["arm"])), others


def refuse_to_compare(runs):
    """ValueError if two of the runs were not trained or measured alike."""
    first = runs.iloc[0]
    for _, run in runs.iterrows():
        for name in SHARED:
            if run[name] != first[name]:
                raise ValueError(
                    f"{first['folder']} and {run['folder']} can't be compared: {name} is "
                    f"{first[name]!r} and {run[name]!r}. Name folders of runs that share it"
                )


def short_names(arms):
    """The names without the settings that all of them share: diff-decay is diff where every arm
    has decay."""
    names = [name.split("-") for name in arms]
    shared = set(names[0]).intersection(*names) - {parts[0] for parts in names}
    return ["-".join(part for part in parts if part not in shared) for parts in names]


def at_best_rates(runs):
    """The runs of each arm at the learning rate with its lowest mean loss, and a data frame of
    these rates: arm, lr, tried (how many were), edge (whether it is the lowest or the highest of
    several)."""
    import pandas as pd

    rows = []
    for name, group in runs.groupby("arm", sort=False):
        mean = group.groupby("lr")["loss"].mean()  # inf where a run diverged
        best = mean.idxmin()
        edge = len(mean) > 1 and best in (mean.index.min(), mean.index.max())
        rows.append(dict(arm=name, lr=best, tried=len(mean), edge=edge))
    rates = pd.DataFrame(rows)
    return runs.merge(rates[["arm", "lr"]]), rates


def pairs_with_softmax(runs):
    """(arm, softmax arm) for each arm that has a softmax with the same settings among the runs. The
    settings that only other arms have, like that of the norm, may differ."""
    same = [f.name for f in fields(GPTConfig) if f.name not in OWN]
    arms = runs.drop_duplicates("arm").to_dict("records")
    softmax = {}
    for run in arms:
        if run["attn"] == "softmax" and not run["subln"] and not run["minus_average"]:
            softmax[tuple(run[name] for name in same)] = run["arm"]
    pairs = []
    for run in arms:
        base = softmax.get(tuple(run[name] for name in same), run["arm"])
        if base != run["arm"]:
            pairs.append((run["arm"], base))
    return pairs


def loss_table(runs, rates):
    """A row for each arm, for the page."""
    table = rates.copy()
    table["edge"] = table["edge"].map({True: "at the edge", False: ""})
    if (rates["tried"] == 1).all():
        table = table.drop(columns=["tried", "edge"])
    table = table.merge(report.plus_minus(report.means(runs), "mean"))
    differences = report.plus_minus(report.compare(runs, pairs_with_softmax(runs)), "difference")
    table["− softmax"] = table["arm"].map(differences.set_index("arm")["difference"])
    table["tok/s"] = table["arm"].map(runs.groupby("arm")["tok_per_s"].median())
    return table.rename(columns={"mean": "val loss"})


def loss_figure(runs, unit):
    """The curves above, and the final losses below: a dot for each run, the mean, its interval."""
    from matplotlib.ticker import EngFormatter

    table = report.means(runs)
    rows = len(table)
    ratios = dict(height_ratios=[3.5, 1 + 0.4 * rows])
    figure, (above, below) = report.new_figure(2, height=5 + 0.4 * rows, gridspec_kw=ratios)

    curves = runs[np.isfinite(runs["loss"])].explode("curve")
    curves["tokens"] = [tokens for tokens, _ in curves["curve"]]
    curves["val loss"] = [loss for _, loss in curves["curve"]]
    # the fall of the first tenth is alike for all, and would press the rest into a line
    curves = curves[curves["tokens"] >= runs["tokens"].max() / 10]
    report.lines(above, curves, "tokens", "val loss", each="folder")
    above.set(xlabel="tokens of training", ylabel=f"val loss, {unit}", title="Learning curves")
    above.xaxis.set_major_formatter(EngFormatter())
    if len(curves):
        above.legend()

    report.dots(below, runs, table)
    below.set(xlabel=f"final val loss, {unit}", title="Each run, and the mean (95 % interval)")
    return figure


def loss(args):
    """Final losses and learning curves of the runs below some folders.

    Runs that differ in the seed alone are one arm. Where an arm was trained with several learning
    rates, the one with the lowest mean loss counts. It is chosen on these same runs, so its loss is
    a little too good: choose on other seeds to be strict. A run that diverged has the loss inf. An
    arm is compared to softmax with the same settings, and its name has those that differ between
    the arms. ± is half of a 95 % interval: Student's t for a mean, Welch's for a difference.
    """
    runs, others = read_runs(args.folders)
    chosen, rates = at_best_rates(runs)
    unit = "nats per byte" if runs["tokenizer"].iloc[0] == "bytes" else "nats per token"
    tables = {f"Final val loss, {unit} (± is half of a 95 % interval)": loss_table(chosen, rates)}
    if len(others):
        tables["Left out"] = others[["folder", "status"]]
    conditions = {name: ", ".join(map(str, chosen[name].unique())) for name in CONDITIONS}
    conditions["machine"] = conditions.pop("device_name")
    columns = ["folder", "arm", "attn", "lr", "seed", "status", "loss", "tok_per_s", *CONDITIONS]
    rows = runs[columns].to_dict("records")
    figure = loss_figure(chosen, unit)
    report.publish(args.out, "loss", "Val loss by arm", tables, rows, conditions, figure)


# what speed and decode share


def make_config(args, name, T, B):
    """train.py's Config of an arm whose step has B sequences of T tokens. ValueError if there is no
    such arm."""
    settings = train.PRESETS[args.preset] | dict(attn=name, block_size=T, batch_size=B)
    settings |= dict(total_batch=B * T, decay=args.decay, minus_average=args.minus_average)
    settings |= dict(preset=args.preset, vocab_size=VOCABULARY[args.preset])
    return Config(**settings)


def first_line(error):
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]


def time_rounds(builders, repeats, enough=0.03):
    """Times functions in turn, round by round, so that a slow minute slows all of them.

    builders: {arm: build}. build() returns a function and a dict of facts about it. In each round a
    function is called so often that it takes about `enough` seconds. Returns a list of dicts: arm,
    round, seconds (of a call) and the facts. An arm that fails has one dict, with its `error`.
    """
    torch.compiler.reset()  # else many sizes together reach torch's limit of recompilations
    rows = []
    built = {}
    timers = {}  # {arm: (timer, calls in a round, facts)}
    for name, build in builders.items():
        try:
            built[name] = build()
        except Exception as e:  # of many classes: it depends on what the machine lacks
            rows.append(dict(arm=name, error=first_line(e)))
    for name, (function, facts) in built.items():
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        timer = Timer("f()", globals=dict(f=function), num_threads=torch.get_num_threads())
        try:
            once = timer.timeit(1).median  # after two calls, which compile and warm up
        except Exception as e:
            rows.append(dict(arm=name, error=first_line(e)))
            continue
        if torch.cuda.is_available():
            facts["peak GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        timers[name] = (timer, max(1, round(enough / once)), facts)
    for number in range(1, repeats + 1):
        for name, (timer, calls, facts) in timers.items():
            # the timer waits for the GPU before it looks at the clock
            seconds = timer.timeit(calls).median
            rows.append(dict(arm=name, round=number, seconds=seconds) | facts)
    return rows


def quartiles(values):
    """The two quartiles as text: the spread of the rounds."""
    low, high = np.quantile(values, [0.25, 0.75])
    return f"{report.format_cell(float(low))} to {report.format_cell(float(high))}"


def timing_table(timings, first):
    """A row for each T and arm: medians over the rounds, and their spread from quartile to quartile.

    An arm is compared to the arm `first` within each round, because a slow round slows both.
    """
    import pandas as pd

    rows = []
    for (T, name), group in timings.groupby(["T", "arm"], sort=False):
        row = dict(T=T, sequences=group["sequences"].iloc[0], arm=name)
        group = group.dropna(subset="round").set_index("round")
        if group.empty:  # it could not be timed
            rows.append(row)
            continue
        row["tokens/s"] = float(group["tokens/s"].median())
        row["spread"] = quartiles(group["tokens/s"])
        of_first = timings[(timings["T"] == T) & (timings["arm"] == first)]
        of_first = of_first.dropna(subset="round").set_index("round")["tokens/s"]
        if len(of_first):
            ratio = group["tokens/s"] / of_first
            row[f"× {first}"] = float(ratio.median())
            row[f"spread of × {first}"] = quartiles(ratio)
        for fact in ("MFU", "peak GiB", "bytes of state"):
            if fact in group and group[fact].notna().any():
                row[fact] = group[fact].median()
        rows.append(row)
    table = pd.DataFrame(rows)
    if "error" in timings:
        errors = timings.dropna(subset="error").set_index(["T", "arm"])["error"]
        table["error"] = [errors.get((row["T"], row["arm"]), "") for row in rows]
    return table


def timing_figure(timings):
    """A panel for each part: median tokens per second over T, the middle half of the rounds
    shaded."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    timed = timings.dropna(subset="round")
    parts = timed["part"].unique()
    figure, axes = report.new_figure(len(parts), height=0.5 + 3.5 * len(parts))
    for ax, part in zip(axes, parts):
        groups = timed[timed["part"] == part].groupby(["arm", "T"], sort=False)["tokens/s"]
        table = groups.quantile([0.25, 0.5, 0.75]).unstack().reset_index()
        report.lines(ax, table, "T", 0.5, low=0.25, high=0.75)
        lengths = sorted(table["T"].unique())
        ax.set(xscale="log", yscale="log", title=part, ylabel="tokens per second")
        ax.set_xticks(lengths, [f"{T:,}" for T in lengths])
        ax.set_xticks([], minor=True)
        ax.yaxis.set_major_locator(LogLocator(subs=[1, 2, 3, 5, 7]))
        ax.yaxis.set_major_formatter(EngFormatter())
        ax.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    axes[-1].set_xlabel("T, tokens of context")
    return figure


def publish_timings(args, name, title, parts):
    """Times the arms in each part at each length, and publishes a table and a panel for each part.

    parts: {heading: (build, sequences)}. build(args, arm, T, B) is a builder as time_rounds needs
    it, and sequences(T) is B. Raises ValueError if no arm can be timed.
    """
    import pandas as pd

    args.out.mkdir(parents=True, exist_ok=True)  # now, and not after an hour of timing
    torch.set_float32_matmul_precision("high")  # as in train.py
    rows = []
    for part, (build, sequences) in parts.items():
        for T in args.T:
            B = sequences(T)
            builders = {name: partial(build, args, name, T, B) for name in args.arms}
            timed = time_rounds(builders, args.repeats)
            for row in sorted(timed, key=lambda row: args.arms.index(row["arm"])):
                if "seconds" in row:
                    row["tokens/s"] = row.pop("tokens") / row["seconds"]
                if row.get("full speed"):
                    row["MFU"] = row["tokens/s"] / row["full speed"]
                rows.append(dict(part=part, T=T, sequences=B) | row)
    timings = pd.DataFrame(rows)
    if "round" not in timings:
        raise ValueError(f"nothing could be timed: {rows[0]['error']}")

    tables = {}
    for part, group in timings.groupby("part", sort=False):
        tables[f"{part}: median of the rounds, spread between the quartiles"] = timing_table(
            group, args.arms[0]
        )
    machine = Config()  # the defaults of a training
    conditions = dict(preset=args.preset, decay=args.decay, minus_average=args.minus_average)
    conditions |= dict(rounds=args.repeats, dtype=machine.dtype, compiled=machine.compile)
    conditions |= dict(torch=torch.__version__, machine=train.device_name(machine.device))
    report.publish(args.out, name, title, tables, rows, conditions, timing_figure(timings))


# speed


def build_layer(args, name, T, B):
    """Forward and backward pass of one attention layer, with its projections."""
    config = make_config(args, name, T, B)
    layer = ATTENTION[name](config.model_config(), depth=0).to(config.device)
    position = torch.arange(T, device=config.device)
    rope = make_rope(position, config.model_config(), torch.float32)
    x = torch.randn(B, T, config.n_embd, device=config.device, requires_grad=True)
    inputs = [x, *layer.parameters()]
    compiled = torch.compile(layer) if config.compile else layer

    def forward_and_backward():
        with train.autocast(config):
            y = compiled(x, rope)
        torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)

    return forward_and_backward, dict(tokens=B * T)


def build_step(args, name, T, B):
    """A training step, the very function that train.py calls: data, passes, clipping, AdamW."""
    config = make_config(args, name, T, B)
    model = GPT(config.model_config(), seed=None).to(config.device)
    optimizer = train.make_optimizer(model, config.lr, config.weight_decay)
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=4 * B * T + 1)
    data = Shards([tokens])
    compiled = torch.compile(model) if config.compile else model

    def step():
        train.training_step(compiled, optimizer, data, config, step=0)

    return step, {"tokens": B * T, "full speed": train.full_speed(config)}


def speed(args):
    """Tokens per second of an attention layer alone and of a training step, by length.

    The layer is timed with its projections, forward and backward. The training step is a whole one,
    as train.py makes it on this machine: compiled and in bfloat16 where train.py would do that. All
    lengths have the same number of tokens in a step, that of the preset's micro-step, but at least
    one sequence. The arms are timed in turn, in --repeats rounds, so that a slow minute slows all
    of them, and each is compared to the first one within a round.
    """
    on_cuda = pick_device().type == "cuda"
    args.T = args.T or ([1024, 4096, 16384] if on_cuda else [256, 1024, 4096])
    preset = Config(**train.PRESETS[args.preset])
    tokens = preset.batch_size * preset.block_size

    def sequences(T):
        return max(1, tokens // T)

    parts = {"Attention layer": (build_layer, sequences), "Training step": (build_step, sequences)}
    publish_timings(args, "speed", "Training speed by length", parts)


# decode


def build_decoding(args, name, T, B):
    """A greedy step of the sampler, among the last tokens before the context of T is full."""
    config = make_config(args, name, T, B)
    model = GPT(config.model_config(), seed=None).to(config.device)
    if config.dtype == "bfloat16":
        # as in sample.py: autocast would cast the weights anew for every token
        round_to_bf16(model)
    run_step = model.step
    if config.compile:  # with CUDA graphs, as in sample.py
        run_step = torch.compile(model.step, mode="reduce-overhead", fullgraph=True)
    idx = torch.zeros(B, 1, dtype=torch.int64, device=config.device)  # any token takes as long
    with torch.inference_mode(), train.autocast(config):
        _, state = model.prefill(idx, room=T)
    free = min(64, T)
    steps = itertools.count()

    def step():
        with torch.inference_mode(), train.autocast(config):
            if next(steps) % free == 0:
                state["length"].fill_(T - free)  # the context was full: back by some tokens
            logits = run_step(idx, state)
            return next_token(logits[:, -1], temperature=0)

    size = sum(tensor.nbytes for layer in state["layers"] for tensor in layer.values())
    return step, {"tokens": B, "bytes of state": size // B}


def decode(args):
    """Tokens per second of the sampler for one sequence, by the length of its context.

    A step takes the likeliest token, as sample.py does it on this machine. The steps that are timed
    are the last ones before the context is full. Beside them stands what the model keeps of the
    context, in bytes. The arms are timed in turn, in --repeats rounds, and each is compared to the
    first one within a round.
    """
    on_cuda = pick_device().type == "cuda"
    args.T = args.T or ([1024, 8192] if on_cuda else [64, 256, 1024, 4096])
    parts = {"A token of the sampler": (build_decoding, lambda T: 1)}
    publish_timings(args, "decode", "Sampling speed by length of context", parts)


# flags


def add_verb(verbs, function):
    """The parser of a verb. Its help is the docstring of the function."""
    text = inspect.getdoc(function)
    # short, so that what is wrong with a flag is not lost below a list of all flags
    usage = "%(prog)s [--flag=value ...]    (--help lists the flags)"
    p = verbs.add_parser(function.__name__, usage=usage, help=text.splitlines()[0],
                         description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.set_defaults(verb=function)
    p.add_argument("--out", type=Path, default=Path("out/bench"),
                   help="folder of the results (%(default)s)")
    return p


def add_timing_flags(p):
    """The flags of speed and decode."""
    switch = argparse.BooleanOptionalAction
    p.add_argument("--arms", type=comma_list(arm), default=list(ATTENTION),
                   help="comma list of arms; the others are compared to the first (all)")
    p.add_argument("--T", type=comma_list(positive),
                   help="comma list of lengths in tokens (on CUDA 1024 and more, else shorter)")
    p.add_argument("--decay", action=switch, default=False, help="heads forget (off)")
    p.add_argument("--minus_average", action=switch, default=False,
                   help="subtract the average map, in the arms with one map (off)")
    p.add_argument("--repeats", type=positive, default=7, help="rounds (%(default)s)")
    p.add_argument("--preset", choices=train.PRESETS,
                   default="gpt2" if torch.cuda.is_available() else "toy",
                   help="the preset of train.py with the model's size (%(default)s)")


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True, metavar="verb")
    p = add_verb(verbs, loss)
    p.add_argument("folders", nargs="*", type=Path, default=[Path("out")],
                   help="folders. All runs below them are read (out)")
    add_timing_flags(add_verb(verbs, speed))
    add_timing_flags(add_verb(verbs, decode))
    args = parser.parse_args(argv)
    args.verb(args)


if __name__ == "__main__":
    cli(main)
