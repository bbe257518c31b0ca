"""
Measurements of runs and checkpoints. Each verb prints Markdown tables and writes <out>/<verb>.md, .json and .png.

    python bench.py loss            # table and curves of the runs below out/
    python bench.py speed           # attention alone and the training step (Table 7 of the paper)
    python bench.py decode          # a token of the sampler, by the length of its context
    python bench.py slices --ckpt out/softmax* out/diff*    # and so every verb that looks at checkpoints

Checkpoints that differ in the seed alone are averaged. `python bench.py <verb> --help` says what is measured. Tables,
figures and sections are those of Differential Transformer, arXiv 2410.05258.
"""
import argparse
import itertools
import json
import math
import shlex
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.benchmark import Timer

import train
from data import get_tokenizer, load_data
from model import ATTENTION, GPT, KERNELS, GPTConfig, Softmax, next_token, pick_kernel

# Okabe and Ito's colours, told apart by every kind of eye; dashed: a difference of two maps
STYLE = {
    "softmax": dict(color="#0072B2", linestyle="-"),
    "diff": dict(color="#D55E00", linestyle="--"),
    "linear": dict(color="#009E73", linestyle="-"),
    "diff_linear": dict(color="#CC79A7", linestyle="--"),
}


def cell(x):
    """A cell of a table. A tuple is a mean or median and its spread; None and NaN are a dash."""
    if isinstance(x, tuple):
        digits = 0 if abs(x[0]) >= 1000 else 3
        return " ± ".join(f"{value:,.{digits}f}" for value in x if not math.isnan(value)) or "–"
    if x is None or x != x:
        return "–"
    if isinstance(x, float):
        return f"{x:,.0f}" if 1000 <= abs(x) < math.inf else f"{x:.4g}"
    return f"{x:,}" if isinstance(x, int) else str(x)


def conditions(device, **more):
    """What every figure is quoted with."""
    return dict(device=train.device_name(device), torch=str(torch.__version__), date=time.strftime("%Y-%m-%d"), **more)


def publish(out, name, about, tables, figure):
    """Prints a result and writes it as out/name.md, .json and .png: all three or, if one can't be written, none.
    about: the conditions. tables: caption to DataFrame. figure: matplotlib's."""
    about = about | dict(command=shlex.join(["python", *sys.orig_argv[1:]]))
    text, records = "; ".join(f"{key}: {value}" for key, value in about.items()), {}
    for caption, df in tables.items():
        lines = [df.columns.tolist(), ["---"] * df.shape[1], *df.map(cell).values.tolist()]
        text += f"\n\n{caption}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)
        records[caption] = json.loads(df.to_json(orient="records", double_precision=15))
    print(f"\n{text}\n")  # first, so that a full disk can't take it
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        Path(folder, f"{name}.md").write_text(text + "\n")
        Path(folder, f"{name}.json").write_text(json.dumps(dict(about=about, tables=records), indent=1) + "\n")
        figure.savefig(Path(folder, f"{name}.png"), dpi=150)
        for file in sorted(Path(folder).iterdir()):
            file.replace(out / file.name)
    print(f"-> {out / name}.md, .json, .png")


def plot(df, x, y, hue="attn", panel=None, **axes):
    """A figure: for each value of hue the mean over the seeds as a line, where x has all of them, and thin the seeds.
    panel: a column, each of whose values gets axes of its own. The rest is for Axes.set."""
    from matplotlib.figure import Figure

    parts = [("", df)] if panel is None else list(df.groupby(panel, sort=False))
    figure, lines, labels = Figure(figsize=(5 * len(parts) + 1, 4.5), layout="constrained"), {}, list(df[hue].unique())
    for ax, (title, part) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts):
        for label, group in part.groupby(hue, sort=False):
            number = labels.index(label)
            style = dict(color=f"C{number}") | STYLE.get(label.replace(",", " ").split()[0], {})
            by_seed = group.pivot_table(y, x, "seed" if "seed" in group else hue, sort=False)
            mean = by_seed.mean(axis=1, skipna=False).dropna()
            ax.plot(by_seed.index, by_seed, linewidth=0.6, alpha=0.3, **style)
            (lines[label],) = ax.plot(mean.index, mean, marker="os^Dvx*P"[number % 8], markersize=4, **style)
        ax.set(**dict(title=title, xlabel=x, ylabel=y) | axes)
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3, fontsize="small")
    return figure


def arms(runs):
    """What tells configurations apart but for their seed, "diff nosubln lr4e-3", for each."""
    found = [[run["attn"]] for run in runs]
    for name in train.IDENTITY:
        values = [run.get(name) for run in runs]
        if name not in ("attn", "seed") and len(set(map(repr, values))) > 1:
            for parts, value in zip(found, values):
                parts += [] if value is None else [train.tag(name, value)[:24]]
    return [" ".join(parts) for parts in found]


def over_seeds(df):
    """df with one row for the seeds of an arm: mean and standard deviation of each column of floats."""
    floats = list(df.select_dtypes("float"))
    groups = df.groupby([c for c in df if c not in floats and c != "seed"], sort=False)[floats]
    return groups.agg(lambda values: (values.mean(), values.std())).reset_index()


def read_runs(folders):
    """The runs below folders, their evaluations, and what doesn't count and why: three DataFrames."""
    import pandas as pd

    rows, evals, others = [], [], []
    for log in sorted({log for folder in folders for log in folder.rglob("log.jsonl")}):
        run = str(log.parent)
        try:
            head, records = train.read_log(log)
        except ValueError as e:
            others.append(dict(run=run, status=str(e)))
            continue
        head, last = asdict(GPTConfig()) | head, [dict(step=0), *records][-1]
        finished = last["step"] == head["steps"] and "val_loss" in last
        stopped = last.get("not_finite", f"stopped at step {last['step']:,} of {head['steps']:,}")
        row = dict(run=run, head=head, status="finished" if finished else stopped, tokens=last.get("tokens"))
        row["loss"] = last["val_loss"] if finished else math.nan
        row["tok/s"] = [record.get("tok_per_s") for record in records]
        rows.append(row | {name: head.get(name) for name in train.IDENTITY})
        evals += [record | dict(run=run, seed=head["seed"]) for record in records if "val_loss" in record]
    if not rows:
        raise ValueError("no runs there: `python train.py --attn=softmax,diff --seed=1,2` makes some")
    runs = pd.DataFrame(rows).assign(arm=arms(rows), but_for_rate=arms([row | dict(lr=None) for row in rows]))
    runs["base"] = (runs["attn"] == "softmax") & ~runs["subln"].eq(True)
    runs["order"] = runs["attn"].map({attn: i for i, attn in enumerate(ATTENTION)})
    runs = runs.sort_values("loss", key=pd.Series.isna, kind="stable")  # of two equal ones a finished one
    runs.loc[runs.duplicated(["arm", "seed"]), "status"] = "the same run as another folder's"
    others += runs.loc[runs["status"] != "finished", ["run", "status"]].to_dict("records")
    runs = runs.drop_duplicates(["arm", "seed"]).sort_values(["order", "arm", "seed"])
    evals = pd.DataFrame(evals, columns=["run", "seed", "step", "tokens", "val_loss"])
    return runs, runs[["run", "arm"]].merge(evals), pd.DataFrame(others)


def summarize(runs, same):
    """A row per arm: the val loss, mean and standard deviation over the seeds, and its difference to the base, run by
    run with the same seed and whatever else is in `same`, mean and standard error."""
    key = runs[same].map(repr).agg(" ".join, axis=1)
    base = dict(zip(key[runs["base"]], runs["loss"][runs["base"]]))
    groups = runs.assign(difference=(runs["loss"] - key.map(base)).mask(runs["base"])).groupby("arm", sort=False)
    table = (groups["loss"].count().astype(str) + f" of {runs['seed'].nunique()}").to_frame("runs")
    table["val loss"] = groups["loss"].agg(lambda values: (values.mean(), values.std()))
    table["− softmax"] = groups["difference"].agg(lambda values: (values.mean(), values.sem()))
    table["tokens"] = groups["tokens"].max()
    table["tok/s"] = runs.explode("tok/s").groupby("arm")["tok/s"].median()
    return table.rename_axis("attn").reset_index()


def loss_curves(evals):
    """Val loss where the runs differ: from the best up by twice their spread at a tenth, at least to the worst end."""
    curves = evals[evals["step"] > 0].sort_values("step", kind="stable")
    early = curves[curves["tokens"] >= curves["tokens"].max() / 10].groupby("run")["val_loss"].first()
    best, worst = curves["val_loss"].min(), curves.groupby("run")["val_loss"].last().max()
    top = max(best + 2 * (early.max() - early.min()), worst)
    figure = plot(curves, "tokens", "val_loss", "arm", xscale="log", ylabel="val loss (nats per token)")
    if top > best:
        figure.axes[0].set_ylim(best - (top - best) / 20, top + (top - best) / 20)
    return figure


def loss(args):
    """Table and curves of the runs below some folders.
    The difference to softmax is taken run by run with the same seed, hence the same shared weights and the same tokens
    in the same order. Where there are several rates, a second table has each arm at its own best. The figure shows the
    losses that differ, not the fall from the first ones."""
    runs, evals, others = read_runs(args.runs)
    same = [name for name in train.IDENTITY if name not in ("attn", "subln", "subln_init", "lambda_init")]
    caption = "Final val loss, nats per token, mean ± standard deviation over seeds; differences ± standard error"
    tables = {caption: summarize(runs, same)}
    if runs["lr"].nunique() > 1:  # one rate for all may suit one arm only
        rates = runs.groupby(["but_for_rate", "lr"], sort=False)["loss"].agg(["count", "mean"]).reset_index()
        edge = rates.groupby("but_for_rate")["lr"].transform(lambda lr: lr.isin([lr.min(), lr.max()]))
        rates["rate"] = rates["lr"].map(repr) + edge.map({True: " (at the edge)", False: ""})
        # a seed that is missing may have been the bad one
        best = rates.sort_values(["count", "mean"], ascending=[False, True]).drop_duplicates("but_for_rate")
        chosen = runs.merge(best[["but_for_rate", "lr"]])
        table = summarize(chosen.assign(arm=chosen["but_for_rate"]), [name for name in same if name != "lr"])
        table.insert(1, "rate", table["attn"].map(best.set_index("but_for_rate")["rate"]))
        tables["Each arm at its own best of these rates"] = table
    if len(others):
        tables["Not in these figures"] = others
    names = ("device_name", "torch", "dtype", "data", "steps", "date")
    about = {name: ", ".join(runs["head"].str.get(name).map(str).unique()) for name in names}
    publish(args.out, "loss", about, tables, loss_curves(evals))


def machine(args):
    """Fills in what the flags leave open. Returns GPTConfig's fields of the preset's size, and the conditions."""
    cuda = args.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(args.device)
    args.preset = args.preset or ("gpt2" if cuda else "toy")
    args.dtype = args.dtype or ("bfloat16" if cuda else "float32")
    args.compile = cuda if args.compile is None else args.compile
    args.autocast = torch.autocast(args.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    torch.set_float32_matmul_precision("high")  # as in train.py
    torch._dynamo.config.recompile_limit = 1000  # one process compiles many sizes of the same few functions
    size = {name: train.PRESETS[args.preset][name] for name in ("n_layer", "n_head", "n_embd")}
    about = conditions(args.device, dtype=args.dtype, compiled=args.compile, repeats=args.repeats, **size)
    return size | dict(vocab_size=50257 if args.preset == "gpt2" else 257), about


def built(args, attn, kernel="auto", **config):
    """A model on the device with that kernel, and which it took. ValueError if it can't run."""
    model = GPT(GPTConfig(attn=attn, **config)).to(args.device)
    took, _ = pick_kernel(model, kernel, getattr(torch, args.dtype))
    return model, dict(kernel=took or "chunks")


def rounds(builders, repeats, enough=0.03):
    """Times {key: build} in interleaved rounds, so that a slow minute slows all. build() gives {what: function}, each
    called for enough seconds, and facts. Returns {key: facts or {"failed": why}} and {(key, what): seconds}."""
    found, calls, seconds = {}, [], {}
    for key, build in builders.items():
        try:
            functions, found[key] = build()
            for what, f in functions.items():
                timer = Timer("f()", globals=dict(f=f), num_threads=torch.get_num_threads())
                n = max(1, round(enough / timer.timeit(1).median))  # two calls before it compile and warm up
                calls.append((key, what, timer, n))
        except Exception as e:  # of many classes, depending on what the machine lacks
            found[key] = {"failed": (str(e).splitlines() or [type(e).__name__])[0]}
            calls = [call for call in calls if call[0] != key]
    for _ in range(repeats):
        for key, what, timer, n in calls:
            seconds.setdefault((key, what), []).append(timer.timeit(n).median)
    return found, {key: np.array(values) for key, values in seconds.items()}


def spread(values):
    """The median, and half the distance between the quartiles."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return middle, (high - low) / 2


def publish_timings(args, rows, about, x, y, hue, panel):
    """ValueError if there is nothing but failures: what an earlier run has written stays."""
    import pandas as pd

    df = pd.DataFrame(rows)
    if y not in df:
        raise ValueError(f"nothing could be timed: {df['failed'][0]}")
    figure = plot(df.dropna(subset=y), x, y, hue, panel, xscale="log", yscale="log")
    tables = {args.verb.__doc__.splitlines()[0]: df.drop(columns="arm", errors="ignore")}
    publish(args.out, args.verb.__name__, about, tables, figure)


def timed(args, size, of, attn, kernel, B, T):
    """What is timed of an arm, {what: function}, and which kernel it took; see `speed`."""
    if of == "attention alone":
        model, facts = built(args, attn, kernel, block_size=T, **size | dict(n_layer=1, vocab_size=64))
        layer, x = model.blocks[0].attn, torch.randn(B, T, size["n_embd"], device=args.device)
        with args.autocast:
            inputs = [y.detach().requires_grad_() for y in layer.project(x)]
        run, rest = layer.fast, [layer.rotation(x)]
    else:
        model, facts = built(args, attn, kernel, block_size=T, **size)
        run, inputs, rest = model, [], torch.randint(size["vocab_size"], (2, B, T), device=args.device)
        optimizer = train.make_optimizer(model, argparse.Namespace(lr=1e-4, weight_decay=0.1))
    run = torch.compile(run, dynamic=False) if args.compile else run

    def forward(grad=False):
        with torch.set_grad_enabled(grad), args.autocast:
            return run(*inputs, *rest)

    def both():
        y = forward(grad=True)
        if inputs:
            torch.autograd.grad(y, [*inputs, *layer.parameters()], torch.ones_like(y), allow_unused=True)
        else:
            y[1].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return {"fwd + bwd": both, "fwd": forward}, facts


def speed(args):
    """Tokens per second of attention alone and of the training step (Table 7).
    Of A V from projected q, k and v, and of a whole step, the optimizer's part included; a call takes --batch_size
    times the preset's block_size tokens, one sequence at least. Medians of interleaved rounds; the ratio to the first
    row is that of the same rounds, ± half the distance between the quartiles."""
    (size, about), rows, preset, keys = machine(args), [], train.PRESETS[args.preset], []
    tokens = (args.batch_size or preset["batch_size"]) * preset["block_size"]
    for attn in args.arms:  # the linear arms have no kernel to choose
        softmax = issubclass(ATTENTION.get(attn, Softmax), Softmax)
        keys += [(attn, kernel) for kernel in (args.kernel if softmax else ["auto"])]
    Ts = args.T or ([1024, 4096, 16384] if args.device.type == "cuda" else [256, 1024, 4096])
    for of, T in itertools.product(("attention alone", "training step"), Ts):
        B = max(1, tokens // T)
        found, seconds = rounds({key: partial(timed, args, size, of, *key, B, T) for key in keys}, args.repeats)
        for key, facts in found.items():
            row = dict(of=of, T=T, attn=key[0], kernel=key[1]) | facts
            for what in ("fwd + bwd", "fwd"):
                if (key, what) in seconds:
                    row[f"{what}, tokens/s"] = float(np.median(B * T / seconds[key, what]))
                    row[f"{what}, × row 1"] = spread(seconds.get((keys[0], what), math.nan) / seconds[key, what])
            rows.append(row | dict(arm=f"{row['attn']} {row['kernel']}"))
    about["tokens a call"] = f"{tokens:,}, one sequence at least"
    publish_timings(args, rows, about, "T", "fwd + bwd, tokens/s", "arm", "of")


def decoding(args, size, attn, B, T):
    """A greedy step of the sampler for B sequences, over the last tokens that its state of T has room for: zeros, which
    take as long as any. Of one sequence also what that saves: a run of the whole context through the model."""
    model, _ = built(args, attn, block_size=T, **size)
    if args.dtype == "bfloat16":  # as in sample.py: autocast would cast the weights anew for every token
        for name, p in model.named_parameters():
            p.data = p.data if "lambda" in name else p.data.bfloat16()
    run = torch.compile(model.step, mode="reduce-overhead", fullgraph=True) if args.compile else model.step
    context, steps, room = torch.zeros(B, T, dtype=torch.int64, device=args.device), itertools.count(), min(64, T)
    with torch.inference_mode(), args.autocast:
        _, state = model.prefill(context[:, :1])

    def step():
        with torch.inference_mode(), args.autocast:
            if next(steps) % room == 0:
                for layer in state:
                    layer["T"].fill_(T - room)
            return next_token(run(context[:, :1], state)[:, -1], 0, None, None, None)

    def recompute():
        with torch.inference_mode(), args.autocast:
            return next_token(model(context)[0][:, -1], 0, None, None, None)

    size = sum(tensor.nbytes for layer in state for name, tensor in layer.items() if name != "T")
    functions = {"step": step, "recompute": recompute} if B == 1 else {"step": step}
    return functions, {"bytes of state a sequence": size // B}


def decode(args):
    """Tokens per second and bytes of state of the sampler, by the length of its context.
    A step is greedy, over the last tokens before T, for --num_samples sequences at once. Of one sequence also how many
    times as fast that is as running the whole context through the model for every token, the way nanoGPT samples."""
    (size, about), rows = machine(args), []
    Ts = args.T or ([1024, 8192] if args.device.type == "cuda" else [64, 256, 1024, 4096])
    for B, T in itertools.product(args.num_samples, Ts):
        found, seconds = rounds({attn: partial(decoding, args, size, attn, B, T) for attn in args.arms}, args.repeats)
        for attn, facts in found.items():
            row = {"sequences": B, "context": T, "attn": attn}
            if (attn, "step") in seconds:
                step = seconds[attn, "step"]
                row |= {"tokens/s": B / float(np.median(step)), "ms a step": 1000 * float(np.median(step))}
            if (attn, "recompute") in seconds:
                row["× recomputing"] = spread(seconds[attn, "recompute"] / step)
            rows.append(row | facts)
    publish_timings(args, rows, about, "context", "tokens/s", "attn", "sequences")


def open_models(args):
    """The checkpoints of --ckpt, each with .enc, its tokenizer, and .arm and .key, its names in a table."""
    models, runs = [], []
    for path in args.ckpt:
        path = path / "ckpt.pt" if path.is_dir() else path
        model = GPT.load(path, args.device).eval()
        if not {"run", "tokenizer"} <= model.extra.keys():
            raise ValueError(f"{path} does not say what it was trained on, as those of train.py do")
        model.enc = get_tokenizer(model.extra["tokenizer"])
        models.append(model)  # of one run there may be an early and a late one: the steps done tell them apart
        runs.append(asdict(model.config) | model.extra["run"] | dict(steps=model.extra["step"]))
    for model, run, arm in zip(models, runs, arms(runs)):
        model.arm, model.key = arm, {"attn": arm, "seed": str(run["seed"])}
    if len({str(model.key) for model in models}) < len(models):
        raise ValueError("--ckpt names a checkpoint twice")
    return models


def open_data(args):
    """The models, train and val of what they were trained on, and T, their smallest block."""
    models = open_models(args)
    path = args.data or models[0].extra["run"]["data"]
    train_split, val, tokenizer, what = load_data(None if str(path) == "pydoc_data.topics" else Path(path))
    for model in models:
        if model.extra["tokenizer"] != tokenizer:
            raise ValueError(f"{model.arm} speaks {model.extra['tokenizer']}, and {what['data']} is in {tokenizer}")
        if args.data is None and model.extra["run"]["data_sha256"] != what["data_sha256"]:
            raise ValueError(f"{model.arm} was trained on other data than {what['data']} is now: name some with --data")
    args.data, T = what["data"], min(model.config.block_size for model in models)
    if not val.sequences(T) or max(int(a.max(initial=0)) for a in val.arrays) >= models[0].config.vocab_size:
        raise ValueError(f"the val split of {what['data']} has not one sequence of {T} tokens that the model knows")
    return models, train_split, val, T


def batches(val, T, args):
    """The first sequences of val, about --tokens: (B, T + 1) int64 at a time, B T at most 8,192 or B = 1."""
    n, B = max(1, min(val.sequences(T), args.tokens // T)), max(1, 8192 // T)
    for first in range(0, n, B):
        rows = [val.sequence(i, T) for i in range(first, min(first + B, n))]
        yield torch.from_numpy(np.stack(rows)).to(args.device)


def token_losses(model, tokens):
    """The loss in nats of each token of (B, T + 1) given those before it: (B, T) float32."""
    logits, _ = model(tokens[:, :-1], tokens[:, 1:])
    return F.cross_entropy(logits.float().mT, tokens[:, 1:], reduction="none")


def val_losses(model, val, T, args, losses=token_losses):
    """The losses of val's first sequences, (n, T) float64."""
    return torch.cat([losses(model, batch).double() for batch in batches(val, T, args)]).numpy(force=True)


def through_scores(model, look):
    """From now on the model runs through its maps, look(S) in the place of every layer's scores S (B, H, T, T)."""

    def seen(scores, *args):
        return look(scores(*args))

    for layer in (block.attn for block in model.blocks):
        layer.flash, layer.scores = False, partial(seen, partial(type(layer).scores, layer))


def attention_maps(model, idx):
    """Every layer's map of idx (B, T): n_layer tensors (B, h, T, T)."""
    found, hooks = [], []
    for block in model.blocks:
        hooks.append(block.attn.register_forward_hook(lambda layer, args, y: found.append(layer.map(args[0]))))
    model(idx)
    for hook in hooks:
        hook.remove()
    return found


def show(args, tables, ylabel, panel=None, figure=None, **about):
    """Publishes tables of checkpoints, caption to rows: over the seeds, where there are several, and each for itself.
    The figure, if none is given, is of the last table, of its columns of floats."""
    import pandas as pd

    tables = {caption: pd.DataFrame(rows) for caption, rows in tables.items()}
    df = list(tables.values())[-1]
    if figure is None:
        curves = df.melt(list(df.select_dtypes(exclude="float")))
        figure = plot(curves, "variable", "value", panel=panel, xlabel="", ylabel=ylabel)
    if df["seed"].nunique() > 1:
        means = {f"{caption}, mean ± standard deviation over seeds": over_seeds(df) for caption, df in tables.items()}
        tables = means | tables
    about = conditions(args.device, dtype="float32", **about, **{"data": args.data} if "data" in args else {})
    publish(args.out, args.verb.__name__, about, tables, figure)


def ngrams(tokens, n, base):
    """The number of the n-gram that ends at each token of (..., T) from the n-th on: (..., T - n + 1) int64."""
    T = tokens.shape[-1]
    return sum(tokens[..., i : T - n + 1 + i].astype(np.int64) * base ** (n - 1 - i) for i in range(n))


def slices(args):
    """Val loss of what the context held before, and of the rest (Table 6; Zoology, arXiv 2312.04927).
    An AR-hit ends an n-gram which its context holds already, so that it could be looked up there, and which is not one
    of the most frequent in the training data, those that make up half of it. n = 2 for gpt2 tokens and 5 for bytes."""
    import pandas as pd

    (models, train_split, val, T), rows, counted = open_data(args), [], []
    base, n = models[0].enc.n_vocab, 2 if models[0].enc.name == "gpt2" else 5
    for a in train_split.arrays:
        counted.append(a[: args.count - sum(map(len, counted))])
    counted = np.concatenate(counted)
    seen = pd.Series(ngrams(counted, n, base)).value_counts()  # the most frequent first
    k = seen.iloc[seen.cumsum().searchsorted(seen.sum() / 2, side="right")]
    numbers = ngrams(torch.cat(list(batches(val, T, args))).numpy(force=True), n, base)
    again = np.stack([pd.Series(row).duplicated() for row in numbers])
    hits = np.pad(again & ~np.isin(numbers, seen.index[seen > k]), ((0, 0), (n - 2, 0)))
    for model in models:
        loss = val_losses(model, val, T, args)
        kinds = {"all": loss, "AR-hits": loss[hits], "the rest": loss[~hits]}
        means = {kind: some.mean() if some.size else math.nan for kind, some in kinds.items()}
        rows.append(model.key | means)
    rule = f"{n}-grams seen more than {k:,} times in the first {len(counted):,} training tokens"
    caption = f"val loss in nats per token; {hits.mean():.1%} of the tokens are AR-hits"
    show(args, {caption: rows}, "val loss (nats per token)", tokens=hits.size, context=T, no_hit=rule)


def windowed_losses(model, tokens):
    """token_losses with what the sampler sees (GPT.generate): when block_size tokens are full, a new beginning at the
    last half of them. (B, T + 1) to (B, T)."""
    block, T = model.config.block_size, tokens.shape[1] - 1
    losses, done, start = [], 0, 0
    while done < T:
        end = min(start + block, T)
        losses.append(token_losses(model, tokens[:, start : end + 1])[:, done - start :])
        done, start = end, end - max(1, block // 2) + 1
    return torch.cat(losses, 1)


def position(args):
    """Mean loss by position in the text, up to and beyond the trained block (Figure 4).
    Every arm sees its whole context; the softmax arms also as sample.py runs them, whose cache starts anew from its
    last half whenever it is full."""
    (models, _, val, T), upto, between = open_data(args), [], []
    L = args.length or 4 * T
    if not val.sequences(L):
        raise ValueError(f"the val split of {args.data} has {val.tokens:,} tokens, too few for --length={L}")
    ends = sorted({min(L, 2**i) for i in range(4, 64) if 2 ** (i - 1) < L} | {min(T, L)})
    for model in models:
        ways = {model.arm: token_losses}
        if isinstance(model.blocks[0].attn, Softmax):
            ways[f"{model.arm}, window"] = windowed_losses
        for name, losses in ways.items():
            c, key = val_losses(model, val, L, args, losses), model.key | dict(attn=name)
            upto.append(key | {f"{end:,}": c[:, :end].mean() for end in ends})
            spans = zip([0, *ends], ends)
            between.append(key | {f"{start + 1:,} to {end:,}": c[:, start:end].mean() for start, end in spans})
    tables = {"Mean loss between positions (nats per token)": between, "Mean loss up to a position": upto}
    show(args, tables, "mean loss up to the position (nats per token)", tokens=c.size, trained_block=T)


def extremes(x):
    """The 100 largest absolute values of x, and a histogram of all of them with 64 bins an octave."""
    x = x.abs().flatten().float()
    parts = x.clamp(2.0**-31.9, 2.0**31.9).log2().split(2**24)  # histc counts in float32
    return x.topk(min(100, len(x))).values.cpu(), sum(torch.histc(part, 4096, -32, 32).double().cpu() for part in parts)


def extremes_row(found):
    """The largest of all extremes(x) in found, and the median, within 0.6 %."""
    tops, histograms = zip(*found)
    top, sums = torch.cat(tops).sort(descending=True).values, sum(histograms).cumsum(0)
    median = 2 ** ((int(torch.searchsorted(sums, sums[-1] / 2)) + 0.5) / 64 - 32)
    return {f"top-{k}": top[k - 1].item() for k in (1, 2, 3, 10, 100) if k <= len(top)} | {"median": median}


def outliers(args):
    """The largest scores and activations beside their median (Table 5).
    Absolute values, over all layers, heads and tokens, of what layer.scores gives below and on the diagonal (attention
    logits in the softmax arms, products of features before the division in the linear ones), for each branch of a
    difference; and of the residual stream after each block."""
    (models, _, val, T), rows = open_data(args), []
    causal = torch.ones(T, T, dtype=torch.bool, device=args.device).tril()
    for model in models:
        branches = model.blocks[0].attn.branches
        scores, stream = [[] for _ in range(branches)], []

        def look(S):
            for i in range(branches):  # noqa: B023
                scores[i].append(extremes(S[:, i::branches][..., causal]))  # noqa: B023
            return S

        through_scores(model, look)
        for block in model.blocks:
            block.register_forward_hook(lambda block, args, y: stream.append(extremes(y)))  # noqa: B023
        n = sum(len(model(batch[:, :-1])[0]) for batch in batches(val, T, args))
        kinds = ["scores, branch 1", "scores, branch 2"] if branches == 2 else ["scores"]
        for kind, found in zip([*kinds, "residual stream"], [*scores, stream]):
            rows.append(dict(of=kind) | model.key | extremes_row(found))
    rows.sort(key=lambda row: row["of"], reverse=True)
    show(args, {"The largest absolute values and the median": rows}, "absolute value", "of", tokens=n * T, context=T)


def residual(args):
    """Norm of the residual stream by layer, at init and at the end.
    The length ||x|| of a token's stream as the embedding and then each block leave it, the mean over val tokens. At
    init: the weights drawn anew from the run's seed. Shows what the norm on each head's output does at first."""
    (models, _, val, T), rows = open_data(args), []
    for model in models:
        names = ["embedding", *(f"block {depth}" for depth in range(model.config.n_layer))]
        new = GPT(model.config, model.extra["run"]["seed"]).to(args.device)
        for when, one in (("init", new), ("end", model)):
            norms = []
            for layer in (one.wte, *one.blocks):
                layer.register_forward_hook(lambda layer, args, y: norms.append(y.norm(dim=-1).flatten()))  # noqa: B023
            for batch in batches(val, T, args):
                one(batch[:, :-1])
            means = [torch.cat(norms[i :: len(names)]).mean().item() for i in range(len(names))]
            rows.append(model.key | dict(at=when) | dict(zip(names, means)))
    tables = {"Norm of the residual stream, mean over tokens": rows}
    show(args, tables, "norm of the residual stream", "at", tokens=args.tokens, context=T)


def absmax(S, bits, dims):
    """S rounded to 2^(bits - 1) - 1 steps either side of zero, the largest absolute value over dims being the last.
    Only entries on and below the diagonal count: the rest is never looked at."""
    step = S.tril().abs().amax(dims, keepdim=True).clamp(min=1e-30) / (2 ** (bits - 1) - 1)
    return (S / step).round() * step


def quant(args):
    """Val loss with the scores rounded to few bits (Figure 8).
    What layer.scores gives is rounded to 2^(bits - 1) - 1 steps either side of zero, the largest absolute value being
    the last step: of each text and layer, all heads and branches together, or with --per=head of each head."""
    (models, _, val, T), rows, above = open_data(args), [], []
    dims = (1, 2, 3) if args.per == "layer" else (2, 3)
    for model in models:
        rounded = {}
        through_scores(model, torch.clone)
        exact = val_losses(model, val, T, args).mean()
        for bits in (8, 6, 4):
            through_scores(model, partial(absmax, bits=bits, dims=dims))
            rounded[f"{bits} bits"] = val_losses(model, val, T, args).mean()
        rows.append(model.key | dict(exact=exact) | rounded)
        above.append(model.key | {bits: loss - exact for bits, loss in rounded.items()})
    tables = {"val loss in nats per token, scores rounded": rows, "the same above that of exact scores": above}
    show(args, tables, "val loss above that of exact scores", tokens=args.tokens, context=T, absmax=args.per)


def score_hellaswag(model, rows, block):
    """The shares of rows whose right ending is the likeliest. A context too long for the block is cut from the left."""
    right, cut = [], 0
    for row in rows:
        context = model.enc.encode_ordinary(row["ctx"])
        endings = [model.enc.encode_ordinary(" " + ending) for ending in row["endings"]]
        cut += len(context) + max(map(len, endings)) > block + 1
        texts = [torch.tensor((context + ending)[-block - 1 :]) for ending in endings]
        padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)  # behind: no token looks ahead
        losses = token_losses(model, padded.to(model.wte.weight.device)).cpu()
        own = [loss[: len(text) - 1][-len(ending) :] for loss, text, ending in zip(losses, texts, endings)]
        likeliest = np.argmin([[x.sum(), x.mean()] for x in own], 0)
        right.append(likeliest == int(row["label"]))
    plain, normalised = np.mean(right, 0).tolist()
    error = math.sqrt(normalised * (1 - normalised) / len(rows))
    return {"accuracy, normalised": normalised, "standard error": error, "accuracy": plain, "contexts cut": cut}


def hellaswag(args):
    """Zero-shot accuracy on HellaSwag, 10,042 unfinished stories with four endings (Section 3.1).
    Normalised accuracy: the ending whose tokens have the smallest mean loss, after the context and a space; beside it
    the accuracy by the sum of the losses. Guessing gets 0.25."""
    import datasets

    models, rows = open_models(args), []
    try:
        stories = datasets.load_dataset(args.source, split="validation")
    except Exception as e:  # no network, no folder, no such split: of many classes
        raise ValueError(f"can't read HellaSwag from --source={args.source}, a folder will do: {e}") from None
    stories = stories.select(range(min(args.limit, len(stories)))).to_list()
    block = min(model.config.block_size for model in models)
    for model in models:
        rows.append(model.key | dict(rows=len(stories)) | score_hellaswag(model, stories, block))
    show(args, {"HellaSwag, zero-shot": rows}, "", source=args.source, context=block)


def maps(args):
    """The attention maps of a text, heads averaged and one by one (Figure 1).
    Row i is how token i mixes the tokens before it; what is subtracted more than it is added is negative. The table is
    of all layers, the figure of one: purple above zero, orange below."""
    models, shown, rows = open_models(args), {}, []
    layer = args.layer or min(model.config.n_layer for model in models)
    for model in models:
        tokens = model.enc.encode_ordinary(args.text)
        if not 1 < len(tokens) <= 256 or layer > model.config.n_layer:
            raise ValueError(f"{model.arm} needs 2 to 256 tokens and a --layer up to {model.config.n_layer}")
        found = [A[0].float().cpu() for A in attention_maps(model, torch.tensor([tokens], device=args.device))]
        shown.setdefault(model.arm, found[layer - 1])  # the first of the seeds
        for depth, A in enumerate(found, 1):
            size = A.abs().sum(-1)
            numbers = {"smallest": A.min(), "largest": A.max(), "sum of a row": A.sum(-1).mean()}
            numbers["negative share"] = (-A).clamp(min=0).sum() / size.sum()
            numbers["on the first token"] = (A[..., 0].abs() / size).mean()
            rows.append(model.key | dict(layer=depth, heads=len(A)) | {name: x.item() for name, x in numbers.items()})
    words = [models[0].enc.decode([t]).replace(" ", "␣").replace("\n", "↵").replace("$", r"\$") for t in tokens]
    tables = {"Attention maps (shares are of absolute values)": rows}
    show(args, tables, "", figure=draw_maps(shown, words), text=repr(args.text), layer_shown=layer)


def draw_maps(shown, words):
    """A column for each arm's map (h, T, T), the mean of the heads on top."""
    from matplotlib.figure import Figure

    heads = max(map(len, shown.values()))
    figure = Figure(figsize=(3.2 * len(shown) + 0.8, 2.9 * (1 + heads)), layout="constrained")
    largest = torch.cat([A[A != 0].abs() for A in shown.values()]).quantile(0.99).item()
    for column, (arm, A) in enumerate(shown.items(), 1):
        for i, B in enumerate([A.mean(0), *A]):
            ax = figure.add_subplot(1 + heads, len(shown), column + i * len(shown))
            B = np.ma.masked_where(np.triu(np.ones(B.shape, bool), 1), B.numpy())
            image = ax.imshow(B, cmap="PuOr", vmin=-largest, vmax=largest)
            ax.set_title(f"{arm}, head {i}" if i else f"{arm}, mean of {len(A)} heads", fontsize=9)
            if len(words) <= 32:
                ax.set_xticks(range(len(words)), words, fontsize=6)
                ax.set_yticks(range(len(words)), words, fontsize=6)
    figure.colorbar(image, ax=figure.axes, shrink=0.4, extend="both", label="weight (1 % are beyond the ends)")
    return figure


def comma_list(text):
    return [train.count(word) if word[0].isdigit() else word for word in text.split(",")]


def main(argv=None):
    raw, default = argparse.RawDescriptionHelpFormatter, "cuda" if torch.cuda.is_available() else "cpu"
    p = argparse.ArgumentParser(prog="bench.py", description=__doc__, formatter_class=raw)
    tokens = {slices: (65_536, 4_000_000), position: (65_536, 4_000_000), outliers: (32_768, 400_000),
              residual: (32_768, 400_000), quant: (16_384, 1_000_000)}  # on a CPU, on a GPU  # fmt: skip
    verbs, of = p.add_subparsers(dest="verb", required=True, metavar="verb"), {}
    for verb in (loss, speed, decode, slices, position, outliers, residual, quant, hellaswag, maps):
        q = verbs.add_parser(verb.__name__, help=verb.__doc__.splitlines()[0], description=verb.__doc__)
        q.set_defaults(verb=verb)
        q.add_argument("--out", type=Path, default="out/bench", help="folder of what is written (%(default)s)")
        of[verb] = q.add_argument
        if verb is not loss:
            q.add_argument("--device", default=default, help="cuda, cpu, … (%(default)s)")
        if verb in (speed, decode):
            q.add_argument("--arms", type=comma_list, default=list(ATTENTION), help="a comma list (all)")
            q.add_argument("--T", type=comma_list, help="lengths, a comma list (1024 and more on cuda, less on a CPU)")
            q.add_argument("--repeats", type=train.count, default=7, help="rounds (%(default)s)")
            q.add_argument("--preset", choices=train.PRESETS, help="train.py's, for the size (gpt2 on cuda, else toy)")
            q.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the matmuls (bfloat16 on cuda)")
            q.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile (on cuda)")
        elif verb is not loss:
            q.add_argument("--ckpt", type=Path, nargs="+", required=True, help="checkpoints, or runs' folders")
        if verb in tokens:
            q.add_argument("--data", type=Path, help="folder of shards or text file (what they were trained on)")
            q.add_argument("--tokens", type=train.count, help="val tokens ({}; on cuda {})".format(*tokens[verb]))
    of[loss]("runs", nargs="*", type=Path, default=[Path("out")], help="folders, the runs below them (out)")
    of[speed]("--kernel", type=comma_list, default=["auto"], help=f"of softmax and diff: auto, {', '.join(KERNELS)}")
    of[speed]("--batch_size", type=train.count, help="sequences of the preset in a call (the preset's)")
    of[decode]("--num_samples", type=comma_list, default=[1, 8, 64], help="sequences at once (1,8,64)")
    of[slices]("--count", type=train.count, default=50_000_000, help="training tokens whose n-grams are counted (5e7)")
    of[position]("--length", type=train.count, help="tokens to go up to (four blocks)")
    of[quant]("--per", choices=("layer", "head"), default="layer", help="what shares one absmax (layer)")
    of[hellaswag]("--source", default="Rowan/hellaswag", help="dataset on the hub, or a folder (%(default)s)")
    of[hellaswag]("--limit", type=train.count, default=10_042, help="rows, from the first (all %(default)s)")
    of[maps]("--text", default="The cat sat on the mat.", help="what the maps are of (%(default)s)")
    of[maps]("--layer", type=train.count, help="the layer in the figure, from 1 (the last)")
    args = p.parse_args(argv)
    if args.verb is not loss:
        try:
            args.device = torch.zeros(1, device=args.device).device
        except (RuntimeError, AssertionError) as e:
            raise ValueError(f"--device={args.device}: {str(e).splitlines()[0]}") from None
    if args.verb in tokens:
        args.tokens = args.tokens or tokens[args.verb][args.device.type == "cuda"]
    import matplotlib  # noqa: F401, what is missing or can't be written to is known now, not after hours
    import pandas  # noqa: F401

    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=args.out), torch.set_grad_enabled(args.verb in (speed, decode)):
        args.verb(args)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ImportError) as e:
        sys.exit(f"bench.py: {e}")
