"""
Compares runs, and times the arms. Each verb prints its tables, and writes them to <out>/<verb>.md
and, as data, to <out>/<verb>.json.

    python bench.py loss out/toy    # the runs below out/toy: val losses with 95 % intervals, curves
    python bench.py speed           # an attention layer alone and the training step, by length
    python bench.py decode          # one token of the sampler, by length of context

`python bench.py <verb> --help` says what is measured and which flags there are.
"""
import argparse
import inspect
import itertools
import json
import math
import os
import shlex
import sys
import time
from dataclasses import fields
from pathlib import Path

# common first: from then on Ctrl-C ends in one line
from common import UserError, cli, comma_list, commit, device_name, path, positive, read_log

import numpy as np
import torch

import train
from data import Shards
from model import ATTENTION, GPT, ModelError, fix_addresses, make_rope, next_token, round_to_bf16

# -----------------------------------------------------------------------------
# tables. A table is a list of dicts, one for a row


def cell(x):
    if isinstance(x, float) and abs(x) < 1000:
        return f"{x:#.4g}"  # four digits, zeros among them
    if isinstance(x, (int, float)):
        return f"{x:,.0f}"
    return "–" if x is None else str(x).replace("|", "\\|").replace("\n", " ")


def markdown(rows):
    """The rows as a Markdown table, padded so that it can be read in a terminal, too."""
    columns = []
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name, "") for row in rows]
        texts = [name, *map(cell, values)]
        width = max(3, *map(len, texts))
        numbers = any(isinstance(value, (int, float)) for value in values)
        column = [text.rjust(width) if numbers else text.ljust(width) for text in texts]
        column.insert(1, "-" * (width - 1) + (":" if numbers else "-"))
        columns.append(column)
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns))


def publish(args, title, tables, conditions):
    """Writes and prints the tables, {heading: rows}, and the conditions under which they hold."""
    file = args.out / args.verb.__name__
    parts = [f"# {title}"]
    for heading, rows in tables.items():
        parts.append(f"## {heading}\n\n{markdown(rows)}")
    parts.append("\n".join(f"- {name}: {value}" for name, value in conditions.items()))
    parts.append(f"    {args.command}")
    text = "\n\n".join(parts) + "\n"
    data = dict(conditions, command=args.command, tables=tables)
    try:
        file.with_suffix(".md").write_text(text, "utf-8", "backslashreplace")
        file.with_suffix(".json").write_text(json.dumps(data, indent=1))
    finally:
        print(text)  # also where the disk is full
    print(f"-> {file}.md")


# -----------------------------------------------------------------------------
# loss

# what makes a run the run it is, but for its arm and its seed
SETTINGS = [f.name for f in fields(train.Config) if f.metadata.get("identity", True)]
SETTINGS = [name for name in SETTINGS if name not in ("attn", "seed")]
# what two runs must share, or their losses can't be compared. tokens is steps x total_batch
SHARED = ["data_sha256", "tokenizer", "tokens", "block_size", "eval_tokens", "dtype"]


def read_run(log):
    """What a log.jsonl says of its run: all that its first line has, and how the run ended.

    loss: the last val loss, inf if it diverged. curve: {tokens: val loss}. tok_per_s: the median.
    Raises UserError, with the reason, if there is no final loss in the log.
    """
    try:
        head, records = read_log(log)
    except OSError as e:
        raise UserError(f"can't be read: {e.strerror}") from None
    types = dict(attn=str, seed=int, steps=int, total_batch=int)
    if not records or not all(isinstance(head.get(name), types[name]) for name in types):
        raise UserError("no step in the log, or it is not one of train.py")
    last = records[-1]
    if any("diverged" in record for record in records):
        loss = math.inf
    elif last["step"] == head["steps"] and "val_loss" in last:
        loss = last["val_loss"] if math.isfinite(last["val_loss"]) else math.inf
    else:
        raise UserError(f"stopped at step {last['step']} of {head['steps']}")
    B = head["total_batch"]
    curve = {r["step"] * B: r["val_loss"] for r in records if "val_loss" in r}
    speeds = [r["tok_per_s"] for r in records if "tok_per_s" in r]
    run = dict(folder=log.parent, loss=loss, curve=curve, tokens=head["steps"] * B)
    return head | run | dict(tok_per_s=float(np.median(speeds)) if speeds else None)


def read_runs(folders):
    """The runs below the folders that have ended, and a table of the others with the reasons."""
    logs = set()
    for folder in folders:
        found = [log for log in folder.rglob("log.jsonl") if log.is_file()]
        if not found:
            command = "python train.py --attn=softmax,diff"
            raise UserError(f"there are no runs below {folder}: `{command}` makes some")
        logs.update(found)
    runs = []
    left_out = []
    for log in sorted(logs):
        try:
            runs.append(read_run(log))
        except UserError as e:
            left_out.append(dict(folder=str(log.parent), reason=str(e)))
    if not runs:
        raise UserError("no run has ended. {folder}: {reason}".format(**left_out[0]))
    return runs, left_out


def refuse_to_compare(runs):
    """UserError if two of the runs were not trained or measured alike."""
    first = runs[0]
    for run in runs:
        for name in SHARED:
            if run.get(name) != first.get(name):
                raise UserError(
                    f"{first['folder']} and {run['folder']} can't be compared: {name} is "
                    f"{first.get(name)} and {run.get(name)}. Name folders whose runs share it"
                )


def pool_seeds(runs):
    """{label: runs that differ in the seed alone}, and a table of the copies that are left out.

    A label is the arm, and those of its settings in which the runs differ: "diff subln=False".
    """
    differ = [name for name in SETTINGS if any(r.get(name) != runs[0].get(name) for r in runs)]
    rows = {}
    copies = []
    for run in runs:
        # None is what is usual for the arm
        settings = [f"{name}={run[name]}" for name in differ if run.get(name) is not None]
        row = rows.setdefault(" ".join([run["attn"], *settings]), [])
        twin = next((other for other in row if other["seed"] == run["seed"]), None)
        if twin is None:
            row.append(run)
        elif twin["loss"] == run["loss"]:
            copies.append(dict(folder=str(run["folder"]), reason=f"a copy of {twin['folder']}"))
        else:
            raise UserError(
                f"{twin['folder']} and {run['folder']} have the same settings and seed, but ended "
                f"at {twin['loss']} and {run['loss']}. Name folders with one of the two"
            )
    arms = [*ATTENTION, *(run["attn"] for run in runs)]  # those of other files come last
    order = sorted(rows, key=lambda label: (arms.index(rows[label][0]["attn"]), label))
    return {label: rows[label] for label in order}, copies


def half_interval(*samples):
    """Half of the 95 % interval of a mean (Student), or of the difference of two means (Welch).

    None where a sample is a single run, or where a run diverged.
    """
    from scipy import stats

    if any(len(sample) == 1 or math.inf in sample for sample in samples):
        return None
    variances = [np.var(sample, ddof=1) / len(sample) for sample in samples]  # of the means
    parts = [v**2 / (len(sample) - 1) for v, sample in zip(variances, samples)]
    if sum(parts) == 0:
        return 0.0
    freedom = sum(variances) ** 2 / sum(parts)  # Welch's degrees. Of one sample they are n - 1
    return float(stats.t.ppf(0.975, freedom) * math.sqrt(sum(variances)))


def loss_table(rows):
    """A row for each of {label: runs}. The first one is what the others are compared to."""
    first = next(iter(rows))
    base = [run["loss"] for run in rows[first]]
    table = []
    for label, runs in rows.items():
        losses = [run["loss"] for run in runs]
        speeds = [run["tok_per_s"] for run in runs if run["tok_per_s"] is not None]
        row = {"arm": label, "n": len(runs), "tok/s": float(np.median(speeds)) if speeds else None}
        row |= {"val loss": float(np.mean(losses)), "±": half_interval(losses)}
        if label != first:
            row[f"− {first}"] = row["val loss"] - table[0]["val loss"]
            row["± (Welch)"] = half_interval(losses, base)
        table.append(row)
    return table


def draw_curves(rows, unit, path):
    """The learning curves: a thin line for each run, and a thick one for the mean of a row."""
    from matplotlib.figure import Figure

    height = max(4.5, 0.22 * len(rows))  # inches, for the legend
    figure = Figure(figsize=(8, height), layout="constrained")
    ax = figure.subplots()
    for i, (label, runs) in enumerate(rows.items()):
        style = dict(color=f"C{i}", linestyle=["-", "--", ":", "-."][i // 10 % 4])
        for run in runs:
            # the fall of the first tenth is alike for all, and would press the rest into a line
            curve = {x: y for x, y in run["curve"].items() if x >= run["tokens"] / 10}
            ax.plot(curve.keys(), curve.values(), linewidth=0.8, alpha=0.5, **style)
        # where a run is missing, the mean of the others would make a step that no run has
        shared = [x for x in curve if all(x in run["curve"] for run in runs)]
        mean = [np.mean([run["curve"][x] for run in runs]) for x in shared]
        ax.plot(shared, mean, linewidth=2, marker=".", label=label, **style)
    ax.set(xlabel="tokens of training", ylabel=f"val loss, {unit}")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=150)


def loss(args):
    """Val losses and learning curves of the runs below some folders.

    Runs that differ in nothing but the seed are one row. All other settings are read from the logs,
    and a row's name has those in which the rows differ: the learning rate is one like any other.
    ± is half of a 95 % interval: Student's t for a mean, Welch's for the difference from the first
    row. A run that diverged has the loss inf, and so has its row. Runs that were not trained on as
    many tokens of the same data, or not measured alike, are refused.
    """
    runs, left_out = read_runs(args.folders)
    refuse_to_compare(runs)
    rows, copies = pool_seeds(runs)
    unit = "nats per byte" if runs[0].get("tokenizer") == "bytes" else "nats per token"
    tables = {f"Final val loss, {unit} (± is half of a 95 % interval)": loss_table(rows)}
    if left_out or copies:
        tables["Left out"] = left_out + copies
    conditions = {}
    shown = ["device_name", "torch", "data", "dtype", "steps", "total_batch", "seed"]
    for name in [*shown, "date", "commit"]:
        values = dict.fromkeys(str(run.get(name)) for row in rows.values() for run in row)
        conditions[name] = ", ".join(values)
    publish(args, "Val loss by arm", tables, conditions)
    draw_curves(rows, unit, args.out / "loss.png")


# -----------------------------------------------------------------------------
# speed and decode


def now(device):
    """The time. A GPU first has to do all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def warm_up(build, config):
    """(a function that times a round and returns tokens per second, facts for the table).

    build(config) returns the function to time, the tokens of a call, and a dict of facts.
    """
    on_cuda = config.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    function, tokens, facts = build(config)

    def seconds(calls):
        function()  # not timed: the other arms have had the caches
        start = now(config.device)
        for _ in range(calls):
            function()
        return (now(config.device) - start) / calls

    seconds(3)  # the first calls compile, and record a CUDA graph
    calls = max(1, round(0.03 / seconds(2)))  # a round takes 0.03 s or more
    if on_cuda:
        facts["peak GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return lambda: tokens / seconds(calls), facts


def time_arms(build, configs, repeats):
    """A row for each arm. They are timed in turn, in rounds, so that a slow minute slows them all.

    build is as in warm_up.
    """
    torch.compiler.reset()  # frees what other lengths have compiled
    timed = {}
    facts = {}
    speeds = {}  # {arm: tokens/s in each round}
    errors = {}
    for number in range(1 + repeats):
        for config in configs:
            arm = config.attn
            try:
                if number == 0:
                    timed[arm], facts[arm] = warm_up(build, config)
                elif arm not in errors:
                    speeds.setdefault(arm, []).append(timed[arm]())
            # what a machine may lack: memory, a kernel, a compiler. Others are mistakes in the code
            except (RuntimeError, MemoryError, ModelError) as e:
                errors[arm] = str(e).strip().split("\n")[0] or type(e).__name__
                timed.pop(arm, None)  # leave its memory to the others

    rows = []
    first = configs[0].attn
    for config in configs:
        arm = config.attn
        row = dict(T=config.block_size, sequences=config.batch_size, arm=arm)
        rows.append(row)
        if arm in errors:
            row["error"] = errors[arm]
            continue
        row["tokens/s"] = float(np.median(speeds[arm]))
        if first not in errors:
            # within each round, because a slow round slows both
            ratios = np.array(speeds[arm]) / speeds[first]
            low, middle, high = map(float, np.quantile(ratios, [0.25, 0.5, 0.75]))
            row |= {f"× {first}": middle, "Q1": low, "Q3": high}
        row |= facts[arm]
        if "full speed" in row:
            row["MFU"] = row["tokens/s"] / row.pop("full speed")
    return rows


def publish_timings(args, title, parts):
    """Times the arms in each part at each length, and publishes a table for each part.

    parts: {heading: (build, tokens)}. build is as in warm_up, and tokens says how many there are in
    a step, but at least one sequence.
    """
    torch.set_float32_matmul_precision("high")  # as in train.py
    tables = {}
    for part, (build, tokens) in parts.items():
        rows = []
        for T in args.T:
            print(f"{part}, T = {T:,}", file=sys.stderr)
            B = max(1, tokens // T)
            flags = [f"--preset={args.preset}", f"--attn={','.join(args.arms)}"]
            flags += [f"--block_size={T}", f"--batch_size={B}", f"--total_batch={B * T}"]
            configs = train.parse(flags + ["--decay" if args.decay else "--no-decay"])
            for config in configs:  # the tokenizer's, without opening any data
                config.vocab_size = {"toy": 257, "gpt2": 50257}[args.preset]
            # the arms share the code of GPT and Attention: compile each as if it were alone
            alone = dict(recompile_limit=1000, automatic_dynamic_shapes=False)
            with torch._dynamo.config.patch(**alone):
                rows += time_arms(build, configs, args.repeats)
        tables[f"{part} (medians of the rounds; Q1 and Q3 are quartiles of the ratio)"] = rows
    rows = [row for rows in tables.values() for row in rows]
    if all("error" in row for row in rows):
        raise UserError("nothing could be timed. {arm}: {error}".format(**rows[0]))

    config = configs[0]
    conditions = dict(device_name=device_name(config.device), torch=torch.__version__)
    conditions |= dict(dtype=config.dtype, compiled=config.compile, preset=args.preset)
    conditions |= dict(decay=args.decay, rounds=args.repeats, commit=commit())
    conditions["date"] = time.strftime("%Y-%m-%d")
    publish(args, title, tables, conditions)


def build_layer(config):
    """Forward and backward pass of one attention layer, with its projections."""
    layer = ATTENTION[config.attn](config.model_config(), depth=0).to(config.device)
    rope = make_rope(torch.arange(config.block_size, device=config.device), config, torch.float32)
    size = (config.batch_size, config.block_size, config.n_embd)
    x = torch.randn(size, device=config.device, requires_grad=True)
    inputs = [x, *layer.parameters()]
    compiled = torch.compile(layer) if config.compile else layer

    def forward_and_backward():
        with train.autocast(config):
            y = compiled(x, rope)
        torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)

    return forward_and_backward, config.total_batch, {}


def build_step(config):
    """A training step, the very function that train.py calls: data, passes, clipping, AdamW."""
    model = GPT(config.model_config(), seed=None).to(config.device)
    optimizer = train.make_optimizer(model, config.lr, config.weight_decay)
    size = 4 * config.total_batch + 1
    data = Shards([np.random.default_rng(0).integers(config.vocab_size, size=size)])
    compiled = torch.compile(model) if config.compile else model

    def step():
        train.training_step(compiled, optimizer, data, config, step=0)

    peak = [flops for card, flops in train.PEAK.items() if card in device_name(config.device)]
    full_speed = {"full speed": peak[0] / train.flops_per_token(model)} if peak else {}
    return step, config.total_batch, full_speed


def speed(args):
    """Tokens per second of an attention layer alone and of a training step, by length.

    The layer is timed with its projections, forward and backward. The training step is a whole one,
    as train.py makes it on this machine: compiled and in bfloat16 where train.py would do that. All
    lengths have the same number of tokens in a step, that of the preset's micro-step, but at least
    one sequence. The arms are timed in turn, in --repeats rounds, so that a slow minute slows all
    of them, and each is compared to the first one within a round. A GPU has to hold the models of
    all arms together: --arms times fewer.
    """
    args.T = args.T or ([1024, 4096, 16384] if torch.cuda.is_available() else [256, 1024, 4096])
    [preset] = train.parse([f"--preset={args.preset}"])
    tokens = preset.batch_size * preset.block_size
    parts = {"Attention layer": (build_layer, tokens), "Training step": (build_step, tokens)}
    publish_timings(args, "Training speed by length", parts)


def build_decoding(config):
    """A greedy step of the sampler, among the last ones before a context of block_size is full."""
    model = GPT(config.model_config(), seed=None).to(config.device).eval()
    if config.dtype == "bfloat16":
        round_to_bf16(model)  # as in sample.py: autocast would cast the weights for each token
    if config.device.type == "cpu" and sum(p.numel() for p in model.parameters()) < 10e6:
        torch.set_num_threads(1)  # as there, too
    token = torch.zeros(1, 1, dtype=torch.int64, device=config.device)  # any takes as long
    with torch.inference_mode(), train.autocast(config):
        _, state = model.prefill(token)
    run_step = model.step
    if config.compile:  # with CUDA graphs, as in sample.py
        fix_addresses(state)
        run_step = torch.compile(model.step, mode="reduce-overhead", fullgraph=True)
    free = min(64, config.block_size)
    count = itertools.count()

    def step():
        with torch.inference_mode(), train.autocast(config):
            if next(count) % free == 0:
                state["length"].fill_(config.block_size - free)  # the context was full: go back
            return next_token(run_step(token, state)[:, -1], temperature=0)

    size = sum(tensor.nbytes for layer in state["layers"] for tensor in layer.values())
    return step, 1, {"bytes of state": size}


def decode(args):
    """Tokens per second of the sampler for one sequence, by the length of its context.

    A step takes the likeliest token, as sample.py does it on this machine. The steps that are timed
    are the last ones before the context is full. Beside them stands what the model keeps of the
    context, in bytes. The arms are timed in turn, in --repeats rounds, and each is compared to the
    first one within a round.
    """
    args.T = args.T or ([1024, 8192] if torch.cuda.is_available() else [64, 256, 1024, 4096])
    publish_timings(args, "Sampling speed by length of context", {"A token": (build_decoding, 1)})


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    style = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__, **style)
    verbs = parser.add_subparsers(required=True, metavar="verb")
    for verb in (loss, speed, decode):
        text = inspect.getdoc(verb)
        p = verbs.add_parser(verb.__name__, help=text.split("\n")[0], description=text, **style)
        p.set_defaults(verb=verb)
        p.add_argument("--out", type=path, default=Path("out/bench"),
                       help="folder of the results (%(default)s)")
        if verb is loss:
            p.add_argument("folders", nargs="*", type=path, default=[Path("out")],
                           help="all runs below these folders are read (out)")
            continue
        p.add_argument("--arms", type=comma_list(str), default=list(ATTENTION),
                       help="comma list of arms; the others are compared to the first (all)")
        p.add_argument("--T", type=comma_list(positive),
                       help="comma list of lengths in tokens (on CUDA 1024 and more, else shorter)")
        p.add_argument("--decay", action="store_true", help="heads forget")
        p.add_argument("--repeats", type=positive, default=7, help="rounds (%(default)s)")
        p.add_argument("--preset", choices=train.PRESETS, help="the model's size (%(default)s)",
                       default="gpt2" if torch.cuda.is_available() else "toy")
    args = parser.parse_args(argv)
    args.command = shlex.join(["python", "bench.py", *argv])
    args.out.mkdir(parents=True, exist_ok=True)  # now, and not after an hour of timing
    if not os.access(args.out, os.W_OK):
        raise UserError(f"--out={args.out} can't be written to")
    args.verb(args)


if __name__ == "__main__":
    cli(main)
