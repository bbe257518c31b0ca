"""
Compares runs, and times the arms. A verb prints Markdown tables, and writes them to <out>/<verb>.md

    python bench.py loss out/toy    # the runs below out/toy: val losses with 95 % intervals, curves
    python bench.py speed           # an attention layer alone and the training step, by length
    python bench.py decode          # one token of the sampler at the end of a context, by length

loss: runs that differ in nothing but the seed are one row, and its name has the settings in which
the rows differ. ± is half of a 95 % interval: Student's t for a mean, Welch's for the difference
from the first row. A run that diverged has the loss inf. Data and length have to be the same.

speed, decode: the arms are timed in turn, in rounds, and each is compared to the first one within a
round. The tables have medians of the rounds. A GPU has to hold the models of all arms together.
"""
import argparse
import math
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

# common first: from then on Ctrl-C ends in one line
from common import UserError, cli, comma_list, commit, device_name, path, positive, read_log

import numpy as np
import torch
from torch.utils.benchmark import Timer

import train
from data import Shards
from model import ATTENTION, GPT, ModelError, fix_addresses, make_rope, next_token, round_to_bf16

# ---- loss

# what makes a run the run it is, but for its arm and its seed
SETTINGS = [name for name in train.IDENTITY if name not in ("attn", "seed")]
# what two runs must share, or their losses can't be compared. tokens is steps x total_batch
SHARED = ["data_sha256", "tokenizer", "tokens", "block_size", "eval_tokens", "dtype"]


def read_runs(folders):
    """The runs below the folders that have ended, and a table of the others with the reasons.

    A run is the first line of its log, its folder, loss, tokens, and curve, {tokens: val loss}.
    """
    logs = set()
    for folder in folders:
        if not any(folder.rglob("log.jsonl")):
            raise UserError(f"there are no runs below {folder}: train.py makes some")
        logs.update(folder.rglob("log.jsonl"))

    runs = []
    left_out = []
    for log in sorted(logs):
        folder = str(log.parent)
        head, records = read_log(log)
        reason = None
        if not records or not {"attn", "seed", "steps", "total_batch"} <= head.keys():
            reason = "no step in the log, or it is not one of train.py"
        elif "diverged" not in records[-1]:
            last = records[-1]
            if last["step"] < head["steps"] or "val_loss" not in last:
                reason = f"stopped at step {last['step']} of {head['steps']}"
        if reason:
            left_out.append(dict(folder=folder, reason=reason))
            continue
        B = head["total_batch"]
        curve = {r["step"] * B: r["val_loss"] for r in records if "val_loss" in r}
        final = records[-1].get("val_loss", math.inf)  # a run that diverged has none
        runs.append(head | dict(folder=folder, loss=final, curve=curve, tokens=head["steps"] * B))
    if not runs:
        raise UserError("no run has ended. {folder}: {reason}".format(**left_out[0]))
    return runs, left_out


def check_same(a, b, name):
    """UserError if two runs differ in what they must share."""
    if a.get(name) != b.get(name):
        problem = f"can't be compared: {name} is {a.get(name)} and {b.get(name)}"
        raise UserError(f"{a['folder']} and {b['folder']} {problem}. Name other folders")


def pool_seeds(runs):
    """{label: runs that differ in the seed alone}, and a table of the copies that are left out.

    A label is the arm, and those of its settings in which the runs differ: "diff subln=False".
    """
    differ = [name for name in SETTINGS if any(r.get(name) != runs[0].get(name) for r in runs)]
    arms = [*ATTENTION, *(run["attn"] for run in runs)]  # those of other files come last
    rows = {}
    copies = []
    for run in sorted(runs, key=lambda run: arms.index(run["attn"])):
        # None is what is usual for the arm
        settings = [f"{name}={run[name]}" for name in differ if run.get(name) is not None]
        row = rows.setdefault(" ".join([run["attn"], *settings]), {})  # {seed: run}
        twin = row.setdefault(run["seed"], run)
        check_same(twin, run, "loss")  # else they differ in something that no log tells
        if twin is not run:
            copies.append(dict(folder=run["folder"], reason=f"a copy of {twin['folder']}"))
    return {label: list(row.values()) for label, row in rows.items()}, copies


def half_interval(*samples):
    """Half of the 95 % interval of a mean (Student), or of the difference of two means (Welch)."""
    from scipy import stats

    if any(len(sample) == 1 or math.inf in sample for sample in samples):
        return None  # one run says nothing of the noise, nor does one that diverged
    if len(samples) == 1:
        return stats.t.ppf(0.975, len(samples[0]) - 1) * stats.sem(samples[0])
    low, high = stats.ttest_ind(*samples, equal_var=False).confidence_interval(0.95)
    return (high - low) / 2


def draw_curves(rows, unit, file):
    """The learning curves: a line for each run, in the colour of its row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, max(4.5, 0.22 * len(rows))), layout="constrained")
    ax = figure.subplots()
    for i, (label, runs) in enumerate(rows.items()):
        style = dict(color=f"C{i}", linestyle=["-", "--", ":", "-."][i // 10 % 4], linewidth=1)
        for run in runs:
            # the fall of the first tenth is alike for all, and would press the rest into a line
            curve = {x: y for x, y in run["curve"].items() if x >= run["tokens"] / 10}
            [line] = ax.plot(curve.keys(), curve.values(), **style)
        line.set_label(label)
    ax.set(xlabel="tokens of training", ylabel=f"val loss, {unit}")
    figure.legend(loc="outside right upper")
    figure.savefig(file, dpi=150)


def loss(args):
    """Val losses and learning curves of the runs below some folders."""
    runs, left_out = read_runs(args.folders)
    for run in runs:
        for name in SHARED:
            check_same(runs[0], run, name)
    rows, copies = pool_seeds(runs)

    table = []
    base = None
    for label, same in rows.items():
        losses = [run["loss"] for run in same]
        mean = np.mean(losses)
        row = {"arm": label, "n": len(losses), "val loss": mean, "±": half_interval(losses)}
        if base is None:
            first, base = label, losses
        else:
            row[f"− {first}"] = mean - np.mean(base)
            row["± (Welch)"] = half_interval(losses, base)
        table.append(row)

    unit = "nats per byte" if runs[0].get("tokenizer") == "bytes" else "nats per token"
    tables = {f"Final val loss, {unit} (± is half of a 95 % interval)": table}
    if left_out or copies:
        tables["Left out"] = left_out + copies
    conditions = {}
    for name in ("device_name", "torch", "data", "dtype", "tokens", "seed", "date", "commit"):
        conditions[name] = ", ".join(dict.fromkeys(str(run.get(name)) for run in runs))
    draw_curves(rows, unit, args.out / "loss.png")
    return tables, conditions


# ---- speed and decode


def seconds(function):
    """The time of a call, measured over 0.03 s or more. Timer waits until a GPU has done it all."""
    timer = Timer("f()", globals={"f": function}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.03).median


def time_arms(build, configs, repeats):
    """A row for each arm. They are timed in turn, in rounds, so that a slow minute slows them all.

    build(config) returns the function to time, the tokens of a call, and more cells for the row.
    """
    torch.compiler.reset()  # frees what other lengths have compiled
    rows = {}
    functions = {}
    tokens = {}
    speeds = {config.attn: [] for config in configs}  # tokens/s in each round
    for number in range(1 + repeats):
        for config in configs:
            arm = config.attn
            try:
                if number == 0:
                    rows[arm] = dict(T=config.block_size, sequences=config.batch_size, arm=arm)
                    functions[arm], tokens[arm], more = build(config)
                    rows[arm] |= more
                    seconds(functions[arm])  # compiles, and records a CUDA graph
                elif arm in functions:
                    speeds[arm].append(tokens[arm] / seconds(functions[arm]))
            # what a machine may lack: memory, a kernel, a compiler. Others are mistakes in the code
            except (RuntimeError, MemoryError, ModelError) as e:
                rows[arm]["error"] = f"{type(e).__name__}: {e}".split("\n")[0]
                functions.pop(arm, None)  # leave its memory to the others

    first = configs[0].attn
    for arm in functions:
        rows[arm]["tokens/s"] = np.median(speeds[arm])
        if first in functions:
            # within each round, because a slow round slows both
            ratios = np.divide(speeds[arm], speeds[first])
            rows[arm][f"× {first}"] = np.median(ratios)
            rows[arm] |= {"lowest": ratios.min(), "highest": ratios.max()}
    return list(rows.values())


def build_layer(config):
    """Forward and backward pass of one attention layer, with its projections."""
    layer = ATTENTION[config.attn](config.model_config(), depth=0).to(config.device)
    rope = make_rope(torch.arange(config.block_size, device=config.device), config, torch.float32)
    size = (config.batch_size, config.block_size, config.n_embd)
    x = torch.randn(size, device=config.device, requires_grad=True)
    inputs = [x, *layer.parameters()]
    # the arms share code. dynamic=False compiles each for its own sizes, as if it were alone
    compiled = torch.compile(layer, dynamic=False) if config.compile else layer

    def forward_and_backward():
        with train.autocast(config):
            y = compiled(x, rope)
        torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)

    return forward_and_backward, config.total_batch, {}


def build_step(config):
    """A training step, the very function that train.py calls: data, passes, clipping, AdamW."""
    model = GPT(config.model_config(), seed=None).to(config.device)
    optimizer = train.make_optimizer(model, config.lr, config.weight_decay)
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=4 * config.total_batch + 1)
    data = Shards([tokens])
    compiled = torch.compile(model, dynamic=False) if config.compile else model

    def step():
        train.training_step(compiled, optimizer, data, config, step=0)

    return step, config.total_batch, {}


def build_decoding(config):
    """A greedy step of the sampler, the last one before a context of block_size is full."""
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
        run_step = torch.compile(run_step, mode="reduce-overhead", fullgraph=True, dynamic=False)

    def step():
        with torch.inference_mode(), train.autocast(config):
            state["length"].fill_(config.block_size - 1)
            return next_token(run_step(token, state)[:, -1], temperature=0)

    size = sum(tensor.nbytes for layer in state["layers"] for tensor in layer.values())
    return step, 1, {"bytes of state": size}


def time_all(args):
    """Tokens per second of a training step and of a layer alone, or of the sampler, by length."""
    torch.set_float32_matmul_precision("high")  # as in train.py
    parts = {"Attention layer, forward and backward": build_layer, "Training step": build_step}
    if args.verb == "decode":
        parts = {"A token of the sampler": build_decoding}
    preset = train.Config(**train.PRESETS[args.preset])
    # that of the tokenizer. In training load_data says which one it is, but here we need no data
    preset.vocab_size = {"toy": 257, "gpt2": 50257}[args.preset]
    tables = {}
    for part, build in parts.items():
        tables[part] = []
        for T in args.T:
            print(f"{part}, T = {T:,}", file=sys.stderr)
            # the sampler makes one sequence. A training step has about as many tokens at each T
            B = 1 if args.verb == "decode" else max(1, preset.batch_size * preset.block_size // T)
            size = dict(block_size=T, batch_size=B, total_batch=B * T, decay=args.decay)
            configs = [replace(preset, attn=attn, **size) for attn in args.arms]
            tables[part] += time_arms(build, configs, args.repeats)

    config = configs[0]
    conditions = dict(device_name=device_name(config.device), torch=torch.__version__)
    conditions |= dict(dtype=config.dtype, compiled=config.compile, preset=args.preset)
    conditions |= dict(rounds=args.repeats, date=time.strftime("%Y-%m-%d"), commit=commit())
    return tables, conditions


# ---- the program. A table is a list of dicts, one for a row


def cell(x):
    if isinstance(x, float) and abs(x) < 1000:
        return f"{x:#.4g}"  # four digits, zeros among them
    if isinstance(x, (int, float)):
        return f"{x:,.0f}"
    return "–" if x is None else str(x).replace("|", "\\|")


def markdown(rows):
    """The rows as a Markdown table, padded so that it can be read in a terminal, too."""
    columns = []
    for name in dict.fromkeys(name for row in rows for name in row):
        texts = [name] + [cell(row.get(name, "")) for row in rows]
        width = max(3, *map(len, texts))
        columns.append([text.ljust(width) for text in texts])
        columns[-1].insert(1, "-" * width)
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns))


def main(argv=None):
    """Does what a command line asks for, and returns the tables, {heading: rows}."""
    form = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    p.add_argument("verb", choices=["loss", "speed", "decode"])
    p.add_argument("folders", nargs="*", type=path, default=[Path("out")],
                   help="loss reads all runs below these folders (out)")
    p.add_argument("--out", type=path, default=Path("out/bench"), help="for tables and figure")
    p.add_argument("--arms", type=comma_list(str), default=list(ATTENTION),
                   help="comma list of arms; the others are compared to the first (all)")
    p.add_argument("--T", type=comma_list(positive), default=[256, 1024, 4096],
                   help="comma list of lengths in tokens (256,1024,4096)")
    p.add_argument("--decay", action="store_true", help="heads forget")
    p.add_argument("--repeats", type=positive, default=7, help="rounds (%(default)s)")
    p.add_argument("--preset", choices=train.PRESETS, help="the model's size (%(default)s)",
                   default="gpt2" if torch.cuda.is_available() else "toy")
    args = p.parse_intermixed_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)  # now, and not after an hour of timing

    tables, conditions = loss(args) if args.verb == "loss" else time_all(args)
    parts = [f"## {heading}\n\n{markdown(rows)}" for heading, rows in tables.items()]
    parts.append("\n".join(f"- {name}: {value}" for name, value in conditions.items()))
    parts.append(f"    {shlex.join(['python', 'bench.py', *(argv or sys.argv[1:])])}")
    text = "\n\n".join(parts) + "\n"
    print(text)
    args.out.joinpath(f"{args.verb}.md").write_text(text, "utf-8", "backslashreplace")
    return tables


if __name__ == "__main__":
    cli(main)
