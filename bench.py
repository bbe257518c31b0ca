"""
Every measurement. Each verb prints a Markdown table and writes <out>/<verb>.md, .json and .png.

    python bench.py loss            # the table and the curves of the runs under out/
    python bench.py speed           # attention alone and the training step, Table 7 of the paper
    python bench.py decode          # a token of the sampler, against the length of its context
    python bench.py recall          # retrieval among noise, learnt from scratch: a good first look at what differs
    python bench.py slices --ckpt out/softmax* out/diff*    # and so every verb that looks at checkpoints; those that
                                                            # differ in the seed alone are averaged
    python bench.py <verb> --help

Tables, figures and sections are those of Differential Transformer, arXiv 2410.05258.
"""
import argparse
import datetime
import gc
import importlib.util
import inspect
import io
import json
import logging
import math
import multiprocessing
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import train
from model import ATTENTION, GPT, KERNELS, GPTConfig, Softmax, next_token, pick_kernel
from prepare_fineweb import (Parser, Shards, count, device_name, few_threads, get_tokenizer, load_data, one_of,
                             out_of_memory, pick_device, several, whole)  # fmt: skip

# Okabe and Ito's colours, told apart by every kind of eye; dashed: a difference of two maps
STYLE = {
    "softmax": dict(color="#0072B2", linestyle="-"),
    "diff": dict(color="#D55E00", linestyle="--"),
    "linear": dict(color="#009E73", linestyle="-"),
    "diff_linear": dict(color="#CC79A7", linestyle="--"),
}
ENOUGH = 0.03  # seconds that one timing lasts at least


def conditions(device, **more):
    """What every figure is quoted with."""
    command = " ".join(["python", Path(sys.argv[0]).name, *(shlex.quote(a) for a in sys.argv[1:])])
    return dict(device=device_name(device), torch=str(torch.__version__), **more, date=str(datetime.date.today()), command=command)


def cell(x):
    """One cell: an int with its thousands, a float in four digits, (mean, spread) as mean ± spread, None as a dash."""
    if isinstance(x, tuple):
        return f"{x[0]:.3f}" if x[1] is None else f"{x[0]:.3f} ± {x[1]:.3f}"
    if x is None:
        return "–"
    if isinstance(x, int):
        return f"{x:,}"
    if isinstance(x, float):
        return f"{x:,.0f}" if 1000 <= abs(x) < math.inf else f"{x:.4g}"
    return str(x)


def markdown(rows):
    """A table of rows, dicts of column to cell; the columns stand in the order in which they first appear."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([cell(row.get(name)) for name in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def publish(out, name, about, tables, draw=None, **raw):
    """A result in its three forms: out/name.md, which is printed too, out/name.json, out/name.png.

    about: the conditions, a dict, which stands at the top. tables: caption to rows (see `markdown`). raw: what else the
    JSON should hold. draw(figure) draws on an empty matplotlib figure, and may resize it."""
    parts = ["; ".join(f"{key}: {value}" for key, value in about.items())]
    parts += [f"{caption}\n\n{markdown(rows)}" for caption, rows in tables.items()]
    text = "\n\n".join(parts).encode("utf-8", "backslashreplace").decode() + "\n"
    print(f"\n{text}")  # first, so that a full disk can't take it
    made, note = {"md": text.encode(), "json": (json.dumps(dict(about=about, tables=tables, **raw), indent=1) + "\n").encode()}, ""
    if draw is not None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            note = " (for the figure: pip install matplotlib)"
        else:
            figure, png = Figure(figsize=(8, 4), layout="constrained"), io.BytesIO()
            draw(figure)
            figure.savefig(png, dpi=150)
            made["png"] = png.getvalue()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as whole:  # all or none: what an earlier run wrote stays as it is
        for suffix, content in made.items():
            (Path(whole) / f"{name}.{suffix}").write_bytes(content)
        (out / f"{name}.png").unlink(missing_ok=True)  # no old figure beside new numbers
        for suffix in made:
            os.replace(Path(whole) / f"{name}.{suffix}", out / f"{name}.{suffix}")
    print(f"-> {out / name}" + ", ".join(f".{suffix}" for suffix in made) + note)


def summary(values):
    """(mean, standard deviation), the latter None for fewer than two."""
    return (statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None) if values else None


def error_of_mean(values):
    """(mean, standard error), the latter None for fewer than two."""
    mean, deviation = summary(values) or (None, None)
    return None if mean is None else (mean, deviation and deviation / len(values) ** 0.5)


def results(folders):
    """What the folders hold, by everything but the seed: {identity: {seed: (head, records)}}, and a list of (folder,
    status) of all that is not a finished run."""
    groups, open_ends = {}, []
    for folder in folders:
        try:
            head, records, _ = train.read_log(folder / "log.jsonl")
        except ValueError as e:
            open_ends.append((folder, str(e)))
            continue
        if not records:
            open_ends.append((folder, "never began"))
            continue
        group = groups.setdefault(tuple((k, head.get(k)) for k in train.IDENTITY if k != "seed"), {})
        if head["seed"] in group and (finished(*group[head["seed"]]) or not finished(head, records)):
            open_ends.append((folder, "left out: the same run as another folder's"))
            continue
        group[head["seed"]] = (head, records)
        if not finished(head, records):
            what = records[-1].get("not_finite")
            why = f"not finite ({what})" if what else f"interrupted, at step {records[-1]['step']:,} of {head['steps']:,}"
            open_ends.append((folder, why))
    return groups, open_ends


def finished(head, records):
    return records[-1]["step"] == head["steps"] and isinstance(records[-1].get("val_loss"), float)


def ends(group):
    """{seed: its last record} of the finished runs."""
    return {seed: records[-1] for seed, (head, records) in group.items() if finished(head, records)}


def row(group, base):
    """The columns of one group of runs, and its differences to the group `base`."""
    mine, other = ends(group), ends(base) if base else {}
    seeds = sorted(mine.keys() & other.keys())
    by_seed = [mine[s]["val_loss"] - other[s]["val_loss"] for s in seeds]
    lists = [(mine[s].get("val_losses"), other[s].get("val_losses")) for s in seeds]
    by_sequence = []
    if lists and all(a and b and len(a) == len(b) for a, b in lists):  # each sequence's mean over the seeds
        by_sequence = [statistics.mean(d) for d in zip(*([x - y for x, y in zip(a, b)] for a, b in lists))]
    rates = [r["tok_per_s"] for _, records in group.values() for r in records if r.get("tok_per_s")]
    memory = [r["peak_memory"] for r in mine.values() if r.get("peak_memory")]
    return {
        "runs": f"{len(mine)} of {len(group)}",
        "val loss": summary([r["val_loss"] for r in mine.values()]),
        "− softmax, by seed": None if group is base else error_of_mean(by_seed),
        "− softmax, by val sequence": None if group is base else error_of_mean(by_sequence),
        "tokens": max((r["tokens"] for r in mine.values()), default=None),
        "tok/s": statistics.median(rates) if rates else None,
        "peak memory": f"{max(memory) / 2**30:.2f} GiB" if memory else None,
    }


def telling_apart(keys):
    """What names groups of runs, keyed as in `results`: a function of a key, which says the attention and the fields that
    differ; and these."""
    differ = [k for k in train.IDENTITY if k not in ("seed", "attn") and len({str(dict(key)[k]) for key in keys}) > 1]

    def label(key, without=()):
        values = ((k, dict(key)[k]) for k in differ if k not in without)
        return " ".join([dict(key)["attn"]] + [train.tag(k, str(v)[:9] if isinstance(v, str) else v) for k, v in values if v is not None])

    return label, differ


def compare(folders, out):
    """The table, the curves and the samples of the runs in folders."""
    groups, open_ends = results(folders)
    if not groups:
        sys.exit("bench.py: no runs there: `python train.py --attn=softmax,diff --seed=1,2` makes some")
    label, differ = telling_apart(groups)

    def softmax(key, rate=True):
        """The softmax runs to compare with: the same but for the attention and what belongs to it."""
        own = {"attn", "n_head", "subln", "lambda_init"} | (set() if rate else {"lr"})
        like = [k for k in groups if dict(k)["attn"] == "softmax" and all(a == b for a, b in zip(k, key) if a[0] not in own)]
        same = dict(key)["n_head"]
        return max(like, key=lambda k: (not dict(k)["subln"], dict(k)["n_head"] == same), default=None)

    order = sorted(groups, key=lambda k: (list(STYLE).index(dict(k)["attn"]), label(k)))
    tables = {"Final val loss, nats per token, mean ± standard deviation over seeds; differences ± standard error":
              [{"attn": label(k)} | row(groups[k], groups.get(softmax(k))) for k in order]}  # fmt: skip
    if "lr" in differ:  # one rate for all may suit one arm only
        best = {}
        for k in order:
            loss, rest = row(groups[k], None)["val loss"], label(k, ["lr"])
            rank = loss and (-len(ends(groups[k])), loss[0])  # a seed that is missing may have been the bad one
            if loss and (rest not in best or rank < best[rest][0]):
                best[rest] = (rank, k)
        rates = {rest: sorted(dict(k)["lr"] for k in order if label(k, ["lr"]) == rest) for rest in best}
        chosen = {rest: k for rest, (_, k) in best.items()}
        tables["Each arm at its own best of these rates"] = [
            {"attn": rest, "rate": f"{dict(k)['lr']:g}" + (" (at the edge)" if dict(k)["lr"] in (rates[rest][0], rates[rest][-1]) else "")}
            | row(groups[k], groups.get(next((c for c in chosen.values() if softmax(k, rate=False) and label(c, ["lr"]) == label(softmax(k, rate=False), ["lr"])), None)))
            for rest, k in chosen.items()
        ]
    seeds = sorted({s for group in groups.values() for s in group})
    open_ends += [(f"{label(k)}, seed {s}", "missing") for k in order for s in seeds if s not in groups[k]]
    if open_ends:
        tables["Not in these figures"] = [{"run": str(folder), "status": status} for folder, status in open_ends]

    first = {k: groups[k][min(groups[k])][1] for k in order}  # of every group the records of its first seed
    steps = sorted({r["step"] for records in first.values() for r in records if "sample" in r})
    steps = sorted({*steps[:: math.ceil(len(steps) / 8)], *steps[-1:]})
    said = {k: {r["step"]: repr(r["sample"][len(train.PROMPT) :])[1:-1][:60].replace("|", "\\|") for r in first[k] if "sample" in r} for k in order}
    tables[f"What follows “{train.PROMPT}”, greedily (seed {seeds[0]})"] = [
        {"step": s} | {label(k): said[k].get(s) for k in order} for s in steps
    ]
    heads = [head for group in groups.values() for head, _ in group.values()]
    about = {name: ", ".join(sorted({str(h.get(key)) for h in heads})) for name, key in
             (("device", "device_name"), ("torch", "torch"), ("dtype", "dtype"), ("data", "data"), ("steps", "steps"), ("run on", "date"))}  # fmt: skip
    about |= dict(seeds=", ".join(map(str, seeds)), command=conditions(torch.device("cpu"))["command"])
    for group in groups.values():
        for _, records in group.values():
            records[-1].pop("val_losses", None)  # thousands of figures that the log has too
    runs = [dict(head=head, records=records) for group in groups.values() for head, records in group.values()]
    publish(out, "loss", about, tables, lambda figure: curves(figure, groups, order, label), runs=runs)


def curves(figure, groups, order, label):
    """Val loss against tokens and hours, a thin line per run and their mean; lambda by layer over training."""
    from matplotlib import colormaps

    lambdas = [k for attn in ("diff", "diff_linear") for k in [k for k in order if dict(k)["attn"] == attn][:2]]
    figure.set_size_inches(10, 7 if lambdas else 4)
    above, *below = figure.subfigures(2 if lambdas else 1, 1, squeeze=False)[:, 0]
    against_tokens, against_hours = above.subplots(1, 2, sharey=True)
    for number, key in enumerate(order):
        style = STYLE[dict(key)["attn"]] | dict(marker=["", "o", "s", "^", "v", "D", "x"][sum(dict(k)["attn"] == dict(key)["attn"] for k in order[:number]) % 7])
        points = {}
        for _, records in groups[key].values():
            evals, seconds, tokens = [], 0.0, 0
            for r in records:
                seconds += (r["tokens"] - tokens) / r["tok_per_s"] if r.get("tok_per_s") else 0
                tokens = r["tokens"]
                if "val_loss" in r:
                    evals.append((tokens / 1e6, seconds / 3600, r["val_loss"]))
                    points.setdefault(r["step"], []).append(evals[-1])
            for axes, x in ((against_tokens, 0), (against_hours, 1)):
                axes.plot([e[x] for e in evals], [e[2] for e in evals], alpha=0.3, linewidth=0.7, **style | dict(marker=""))
        whole = [p for _, p in sorted(points.items()) if len(p) == len(groups[key])]
        mean = [[statistics.mean(x) for x in zip(*p)] for p in whole]
        for axes, x in ((against_tokens, 0), (against_hours, 1)):
            axes.plot([m[x] for m in mean], [m[2] for m in mean], label=label(key), markersize=4, **style)
    against_tokens.set(xlabel="training tokens, millions", ylabel="val loss, nats per token")
    against_hours.set(xlabel="hours of training, evaluations not counted")
    against_hours.locator_params(axis="x", nbins=5)
    against_tokens.legend(loc="upper right", fontsize="small")
    for panel in below:
        for axes, key in zip(panel.subplots(1, len(lambdas), sharey=True, squeeze=False)[0], lambdas):
            records = [r for r in groups[key][min(groups[key])][1] if r.get("lambda")]
            for layer, values in enumerate(zip(*(r["lambda"] for r in records))):
                colour = colormaps["viridis"](0.9 * layer / max(1, len(records[0]["lambda"]) - 1))
                axes.plot([r["tokens"] / 1e6 for r in records], values, color=colour, label=f"layer {layer}")
            axes.set(xlabel="training tokens, millions", ylabel="λ" if key is lambdas[0] else None, title=f"{label(key)}, seed {min(groups[key])}")
            if records and len(records[0]["lambda"]) <= 12:
                axes.legend(fontsize="x-small")


def loss(p, args):
    """curves and table of the runs under a folder, and what the models said on the way

    Runs are put together by everything but their seed. The difference to softmax is taken run by run with the same
    seed, hence the same shared weights and the same tokens in the same order; and, tighter, for each val sequence
    (the mean over the seeds), which knows how sure these runs differ, but nothing of other seeds."""
    found = [log.parent for path in args.runs for log in sorted(path.rglob("log.jsonl"))]
    compare(found, args.out)


TABLE6 = {
    "Transformer": "--attn=softmax",
    "half the heads, d doubled": "--attn=softmax --n_head={half}",
    "the same + norm": "--attn=softmax --n_head={half} --subln",
    "Diff": "--attn=diff",
    "Diff − norm": "--attn=diff --no-subln",
    "Diff, λ_init = 0.8": "--attn=diff --lambda_init=0.8",
    "Diff, λ_init = 0.5": "--attn=diff --lambda_init=0.5",
}  # fmt: skip


def ablations(p, args, flags):
    """trains and compares the seven rows of Table 6

    Every other flag is train.py's (--preset=toy, --steps, --device, …). Stop it whenever you like: the same command
    goes on. Then `bench.py residual` says what the norm does to the residual stream."""
    _, (run, *others) = train.parse([f"--preset={args.preset}", *flags])
    if others:
        p.fail("one --attn and one --lr for all seven rows, please")
    folders, rows = {}, []
    for seed in args.seed:
        for number, (name, own) in enumerate(TABLE6.items(), 1):
            folder = args.out / f"table6-row{number}-seed{seed}"
            folders.setdefault(name, []).append(folder)
            own = own.format(half=run.n_head // 2).split()
            train.main([f"--preset={args.preset}", *flags, *own, f"--seed={seed}", f"--out={folder}"])
    groups = {name: results(found)[0] for name, found in folders.items()}
    groups = {name: next(iter(group.values()), {}) for name, group in groups.items()}
    for name, group in groups.items():
        head = next(iter(group.values()))[0]
        heads = head["n_head"] // 2 if head["attn"] == "diff" else head["n_head"]
        norm = head["attn"] == "diff" if head["subln"] is None else head["subln"]
        rows.append({"Model": name, "heads": heads, "d": head["n_embd"] // head["n_head"], "norm": "yes" if norm else "no"})
        rows[-1] |= row(group, groups["Transformer"])
    about = conditions(run.device, data=head["data"], steps=head["steps"], parameters=head["parameters"])
    publish(args.out, "ablations", about, {"The paper's Table 6: final val loss, nats per token; differences to row 1": rows})


def clock(f, device, n=1):
    """Seconds per call of f, n calls in a row: by CUDA events on a GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(n):
            f()
        return (time.perf_counter() - start) / n
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(n):
        f()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1000 / n


def reason(e):
    """What a table says in the place of a number."""
    if out_of_memory(e):
        return "out of memory"
    return (str(e).splitlines() or [type(e).__name__])[0]


def rounds(builders, repeats, device):
    """Times {name: build} in interleaved rounds, so that a slow minute slows them all.

    build() gives {what: function}; two calls of each compile it and warm it up. Returns {name: {what: [seconds by round],
    "peak": bytes on a GPU, of the first function, or None}}, and {name: reason} for what can't be run."""
    found, calls, cuda = {}, [], device.type == "cuda"
    for name, build in builders.items():
        if cuda:  # what the others left is not this one's
            gc.collect()
            before = torch.cuda.memory_allocated(device)
        try:
            functions = build()
            for f in (*functions.values(), *functions.values()):
                f()
            if cuda:
                torch.cuda.reset_peak_memory_stats(device)
                next(iter(functions.values()))()
            one = dict(peak=torch.cuda.max_memory_allocated(device) - before if cuda else None)
            enough = [max(1, round(ENOUGH / clock(f, device))) for f in functions.values()]
            for (what, f), n in zip(functions.items(), enough):
                one[what] = []
                calls.append((one[what], f, n))
            found[name] = one
        except Exception as e:  # of many classes, depending on what the machine lacks
            found[name], functions, f = reason(e), None, None
            if cuda:
                torch.cuda.empty_cache()
    for _ in range(repeats):
        for seconds, f, n in calls:
            seconds.append(clock(f, device, n))
    return found


def spread(values):
    """The median, and half the distance between the quartiles."""
    return statistics.median(values), float(np.subtract(*np.quantile(values, (0.75, 0.25)))) / 2


def machine(p, args):
    """What the flags of a machine and a model's size leave open, and GPTConfig's fields of that size."""
    try:
        args.device = pick_device(args.device)
        cuda = args.device.type == "cuda"
        args.preset = args.preset or ("gpt2" if cuda else "toy")
        preset = train.PRESETS[args.preset]
        size = {name: getattr(args, name) or preset[name] for name in ("n_layer", "n_head", "n_embd")}
        size |= dict(vocab_size=50257 if args.preset == "gpt2" else 257, flash=args.flash)
        for attn in args.arms:
            GPTConfig(attn=attn, **size)
    except ValueError as e:
        p.fail(str(e))
    args.dtype = args.dtype or ("bfloat16" if cuda else "float32")
    args.compile = cuda if args.compile is None else args.compile
    if cuda:
        torch.cuda.set_device(args.device)  # where the events of `clock` are recorded
    args.autocast = torch.autocast(args.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    torch.set_float32_matmul_precision("high")  # as in train.py
    if args.compile:
        torch._dynamo.config.recompile_limit = 1000  # one process compiles many sizes of the same few functions
    return size, preset


def built(args, attn, kernel, **config):
    """A model on the device with that kernel behind it. ValueError if it can't run."""
    model = GPT(GPTConfig(attn=attn, **config)).to(args.device)
    asked = kernel if isinstance(model.blocks[0].attn, Softmax) and model.config.flash else "auto"
    pick_kernel(model, asked, getattr(torch, args.dtype))
    return model


def attention_alone(args, size, attn, kernel, B, T):
    """Builds forward and backward of A V from q, k and v as projected: the rotation and the subtraction count, the
    projections and the norm behind don't."""
    layer = built(args, attn, kernel, block_size=T, **size | dict(n_layer=1, vocab_size=64)).blocks[0].attn
    shapes = [(layer.n_head, layer.d)] * 2 + [(layer.h, size["n_embd"] // layer.h)]
    q, k, v = (torch.randn(B, T, *shape, device=args.device, dtype=getattr(torch, args.dtype)).transpose(1, 2)
               .requires_grad_() for shape in shapes)  # fmt: skip
    R = layer.rotation(q[:, 0])
    fast = layer.fast if args.flash else lambda q, k, v, R: layer.A(q, k, R).to(v.dtype) @ v
    fast = torch.compile(fast, dynamic=False, fullgraph=True) if args.compile else fast

    def forward(mode=torch.no_grad):
        with mode(), args.autocast:
            return fast(q, k, v, R)

    inputs, gradient = [q, k, v, *layer.parameters()], torch.ones_like(forward())
    both = lambda: torch.autograd.grad(forward(torch.enable_grad), inputs, gradient, allow_unused=True)
    return {"fwd+bwd": both, "fwd": forward}


def nanogpt(path, size, T):
    """The model of karpathy/nanoGPT's model.py at path, of our softmax model's size, embedding rows included."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    if spec is None:
        raise ValueError("no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    size = {k: size[k] for k in ("n_layer", "n_head", "n_embd")} | dict(vocab_size=-(-size["vocab_size"] // 64) * 64)
    return module.GPT(module.GPTConfig(block_size=T, dropout=0.0, bias=False, **size))


def training_step(args, size, attn, kernel, B, T):
    """Builds one step of train.py, the optimizer's part included, and the forward pass of its loss."""
    model = nanogpt(args.nanogpt, size, T).to(args.device) if attn == "nanoGPT" else None
    model = model or built(args, attn, kernel, block_size=T, **size)
    run = torch.compile(model, dynamic=False) if args.compile else model
    optimizer = train.make_optimizer(model, argparse.Namespace(lr=1e-4, weight_decay=0.1))
    idx, targets = torch.randint(size["vocab_size"], (2, B, T), device=args.device)

    def forward(mode=torch.no_grad):
        with mode(), args.autocast:
            return run(idx, targets)[1]

    def step():
        forward(torch.enable_grad).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return {"fwd+bwd": step, "fwd": forward}


def crossing(Ts, ratios):
    """The T from which linear is faster, its ratio to softmax above 1: between two measured ones, along a straight line in
    log-log, or None."""
    for i in range(len(Ts) - 1):
        if ratios[i] <= 1 < ratios[i + 1]:
            return float(np.exp(np.interp(0, np.log(ratios[i : i + 2]), np.log(Ts[i : i + 2]))))


def speed(p, args):
    """tokens per second of attention alone and of the training step (Table 7)

    Forward, and forward with backward: of A V from projected q, k and v at every --T, and of the whole training step,
    one step of the optimizer included, at every --train_T. Median of --repeats interleaved rounds ± half the distance
    between the quartiles, in brackets the relative difference to softmax of the same rounds. A call takes as many tokens
    as --batch_size of the preset's sequences have, one sequence at least."""
    size, preset = machine(p, args)
    if args.nanogpt:
        try:
            nanogpt(args.nanogpt, size | dict(n_layer=1, n_embd=2, n_head=1, vocab_size=1), 1)
        except Exception as e:  # whatever that file holds
            p.fail(f"--nanogpt={args.nanogpt} is not nanoGPT's model.py ({reason(e)}): clone github.com/karpathy/nanoGPT")
    cuda, tokens = args.device.type == "cuda", (args.batch_size or preset["batch_size"]) * preset["block_size"]
    Ts = sorted(set(args.T or ([1024, 2048, 4096, 8192, 16384] if cuda else [256, 512, 1024, 2048, 4096, 8192])))
    train_Ts = sorted(set(args.train_T or [T for T in Ts if T in (256, 1024, 4096)] or Ts))
    about = conditions(args.device, dtype=args.dtype, compiled=args.compile, repeats=args.repeats,
                       model=f"{size['n_layer']} layers, {size['n_head']} heads, {size['n_embd']} channels",
                       batch=f"{tokens:,} tokens, one sequence at least")  # fmt: skip
    names, failed = [], {}  # (arm, kernel), and why it can't run; the linear arms have no kernel to choose
    for attn in args.arms:
        for kernel in args.kernel if attn in ("softmax", "diff") and args.flash else ["chunks" if args.flash else "map"]:
            try:
                one = GPT(GPTConfig(attn=attn, **size | dict(n_layer=1, vocab_size=64))).to(args.device)
                asked = kernel if isinstance(one.blocks[0].attn, Softmax) and args.flash else "auto"
                took, why = pick_kernel(one, asked, getattr(torch, args.dtype))
                if took:
                    print(f"{attn}: kernel {took}{why and f' ({why})'}")
                    kernel = took
            except ValueError as e:  # a row of the table, if another one can run
                failed[attn, kernel] = str(e)
            names += [(attn, kernel)] * ((attn, kernel) not in names)
    if failed and all(name in failed for name in names if name[0] in ("softmax", "diff")):
        p.fail(next(iter(failed.values())))
    if args.profile:
        names = [name for name in names if name not in failed]
        return profile(args, size, names, max(1, tokens // train_Ts[0]), train_Ts[0])
    peak_flops = next((flops for name, flops in train.PEAK.items() if cuda and name in about["device"]), None)
    model, tables, timings, lines = GPT(GPTConfig(**size), seed=None), {}, [], {"attention alone": {}, "training step": {}}
    for caption, kind, lengths in (("attention alone", attention_alone, Ts), ("training step", training_step, train_Ts)):
        rows = tables.setdefault(caption, [])
        for length in lengths:
            b = max(1, tokens // length)
            also = [("nanoGPT", "its own")] if args.nanogpt and kind is training_step else []
            build = {(a, k): lambda a=a, k=k: kind(args, size, a, k, b, length) for a, k in names + also}  # noqa: B023
            found = rounds(build, args.repeats, args.device)
            base = next((found[name] for name in names if name[0] == "softmax" and isinstance(found[name], dict)), None)
            for (attn, kernel), one in found.items():
                row = dict(T=length, arm=attn, kernel=kernel)
                rows.append(row)
                if isinstance(one, str):
                    row["Fwd + Bwd tokens/s"] = one
                    continue
                for what, column in (("fwd+bwd", "Fwd + Bwd"), ("fwd", "Fwd")):
                    rate, error = spread([b * length / s for s in one[what]])
                    row[f"{column} tokens/s"] = f"{rate:,.0f} ± {error:,.0f}"
                    ratio = base and spread([s0 / s for s0, s in zip(base[what], one[what])])
                    if ratio and one is not base:
                        row[f"{column} tokens/s"] += f" ({100 * (ratio[0] - 1):+.0f} %)"
                    row[f"{column} / softmax"] = ratio
                    timings.append(dict(of=caption, T=length, batch=b, arm=attn, kernel=kernel, what=what,
                                        seconds=one[what], ratio=ratio and ratio[0], peak=one["peak"]))  # fmt: skip
                    if what == "fwd+bwd":
                        lines[caption].setdefault((attn, kernel), {})[length] = 1e6 / rate
                if cuda:
                    row["peak GB"] = one["peak"] / 1e9
                if kind is training_step and peak_flops:
                    row["MFU"] = model.flops_per_token(length) * b * length / statistics.median(one["fwd+bwd"]) / peak_flops
    crossings = {}
    for caption in lines:
        ratio = {t["T"]: t["ratio"] for t in timings
                 if (t["of"], t["arm"], t["what"]) == (caption, "linear", "fwd+bwd") and t["ratio"]}  # fmt: skip
        crossings[caption] = crossing(sorted(ratio), [ratio[T] for T in sorted(ratio)])

    def draw(figure):
        from matplotlib.ticker import LogLocator

        for axes, (caption, found) in zip(figure.subplots(1, 2), lines.items()):
            for i, ((attn, kernel), line) in enumerate(found.items()):
                style = STYLE.get(attn, dict(color="black"))
                axes.plot(line.keys(), line.values(), marker="osv^D"[i % 5], label=f"{attn} ({kernel})", **style)
            if cross := crossings[caption]:
                axes.axvline(cross, color="grey", linewidth=0.8)
                axes.annotate(f" T = {cross:,.0f}", (cross, 0.02), xycoords=("data", "axes fraction"))
            axes.set(title=caption, xscale="log", yscale="log", xlabel="T", ylabel="µs per token, forward + backward")
            lengths = sorted({T for line in found.values() for T in line})
            axes.set_xticks(lengths, lengths)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            if found:
                axes.legend()

    for caption, cross in crossings.items():
        about[f"{caption}, softmax and linear cross at"] = f"T = {cross:,.0f}" if cross else "no T between those measured"
    publish(args.out, "speed", about, tables, draw, timings=timings, crossing=crossings)


def profile(args, size, names, B, T):
    """Prints torch.profiler's table of one training step of each arm and kernel: the ten costliest kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if args.device.type == "cuda":
        activities += [torch.profiler.ProfilerActivity.CUDA]
    for attn, kernel in names:
        step = training_step(args, size, attn, kernel, B, T)["fwd+bwd"]
        step(), step()
        with torch.profiler.profile(activities=activities) as record:
            clock(step, args.device)
        order = "self_cpu_time_total" if len(activities) == 1 else "self_device_time_total"
        print(f"\n{attn}, {kernel}, {B} x {T} tokens\n{record.key_averages().table(sort_by=order, row_limit=10)}")


def compiled_step(compiled, model):
    """What generate's step is with --compile, else None: what sample.py does."""
    return torch.compile(model.step, mode="reduce-overhead", fullgraph=True, dynamic=False) if compiled else None


def decoding(args, model, B, T, sizes):
    """Builds a greedy step of the sampler for B sequences whose state holds T tokens: zeros, which take as long as any.
    Adds the bytes of the state, the counters apart, to sizes."""
    start, model.config.block_size = max(1, T - 64), T
    with torch.inference_mode(), args.autocast:
        x, t = torch.zeros(B, 1, dtype=torch.int64, device=args.device), start
        _, state = model.prefill(x)
    sizes.append(sum(s.nbytes for layer in state for name, s in layer.items() if name != "T"))
    step_of = compiled_step(args.compile, model)
    run = model.step if step_of is None else step_of

    def step():
        nonlocal x, t
        with torch.inference_mode(), args.autocast:
            if t in (start, T):
                for layer in state:
                    layer["T"].fill_(start)
                t = start
            x, t = next_token(run(x, state)[:, -1], 0, None, None, None), t + 1

    return {"step": step}


def recomputing(args, preset):
    """A row: the sampler, and generation that runs its whole context through the model, as it was trained, for every token:
    the way nanoGPT samples. Softmax, one sequence, greedy: 500 tokens of a toy model, prefill included, or sixteen after
    the first 1,000 of GPT-2 small. The two take turns, so that a slow minute slows both: the sampler makes some tokens on
    end, then the recomputation is timed at evenly spaced lengths among those."""
    toy = preset == "toy"
    block_size, vocab_size, first, last = (512, 257, 1, 500) if toy else (1024, 50257, 1000, 1015)
    turn, gap = (50, 10) if toy else (8, 4)
    size = {name: train.PRESETS[preset][name] for name in ("n_layer", "n_head", "n_embd")}
    size |= dict(block_size=block_size, vocab_size=vocab_size, flash=args.flash)
    plain, model = (built(args, "softmax", "auto", **size) for _ in "12")
    few_threads(model, args.device)
    step, idx = compiled_step(args.compile, model), torch.zeros(1, block_size, dtype=torch.int64, device=args.device)
    fast, slow = [], []
    with torch.inference_mode(), args.autocast:
        list(model.generate(idx[:, :first], 4, temperature=0, step=step))  # warms up, and compiles
        made = model.generate(idx[:, :first], last - first + 4, temperature=0, step=step)
        for _ in range(0 if toy else 3):
            next(made)  # the prefill, and on a GPU the recording of the graph
        for begin in range(first, last + 1, turn):
            fast += [clock(lambda: next(made), args.device) for _ in range(turn)]
            for t in range(begin, begin + turn, gap):
                again = lambda: next_token(plain(idx[:, :t])[0][:, -1], 0, None, None, None)  # noqa: B023
                again()  # the first call at a length is slower: plans, allocations
                slow.append(clock(again, args.device))
    timed = f"at {len(slow)} of {len(fast)} lengths"
    fast, slow = statistics.mean(fast), statistics.mean(slow)
    return {"threads": torch.get_num_threads(), "context": f"{first} to {last}", "sampler tokens/s": 1 / fast,
            "recomputing tokens/s": 1 / slow, "ratio": slow / fast, "recomputation timed": timed}  # fmt: skip


def decode(p, args):
    """tokens per second and bytes of state of the sampler, by the length of its context

    A step is greedy and takes --num_samples sequences at once, over the last 64 tokens before T. With --compile the
    softmax arms attend to all of their cache whatever is in it. A second table sets the sampler beside generation that
    recomputes its context for every token."""
    size, _ = machine(p, args)
    cuda = args.device.type == "cuda"
    Ts = sorted(set(args.T or ([1024, 8192] if cuda else [64, 256, 1024, 4096])))
    if Ts[0] < 2:
        p.fail(f"--T={Ts[0]}: a step needs a token before its own, so at least 2")
    again, threads = [], torch.get_num_threads()
    for preset in (preset for preset in args.recompute if preset != "none"):
        again.append({"model": preset})
        try:
            again[-1] |= recomputing(args, preset)
        except Exception as e:  # no C++ compiler, or no room
            again[-1]["sampler tokens/s"] = reason(e)
        torch.set_num_threads(threads)
    few_threads(GPT(GPTConfig(**size), seed=None), args.device)
    about = conditions(args.device, dtype=args.dtype, compiled=args.compile, repeats=args.repeats,
                       model=f"{size['n_layer']} layers, {size['n_head']} heads, {size['n_embd']} channels")  # fmt: skip
    models, rows, lines, state_size = {}, [], {}, {}
    for attn in args.arms:
        model = GPT(GPTConfig(attn=attn, **size)).to(args.device)
        models[attn] = model
    for B in args.num_samples:
        for T in Ts:
            states = {}
            found = rounds({attn: lambda m=m, attn=attn: decoding(args, m, B, T, states.setdefault(attn, []))
                            for attn, m in models.items()}, args.repeats, args.device)  # fmt: skip
            for attn, one in found.items():
                row = {"sequences": B, "context": T, "arm": attn}
                rows.append(row)
                if isinstance(one, str):
                    row["tokens/s"] = one
                    continue
                rate, error = spread([B / s for s in one["step"]])
                row |= {"tokens/s": f"{rate:,.0f} ± {error:,.0f}", "ms a step": 1000 * B / rate}
                row["bytes of state a sequence"] = states[attn][0] // B
                lines.setdefault((attn, B), {})[T] = rate
                state_size.setdefault(attn, {})[T] = states[attn][0] // B
    tables = {"decode": rows} | ({"against recomputing the context for every token": again} if again else {})

    def draw(figure):
        left, right = figure.subplots(1, 2)
        left.set(xscale="log", yscale="log", xlabel="context", ylabel="tokens per second")
        right.set(xscale="log", yscale="log", xlabel="context", ylabel="bytes of state a sequence")
        shape = {B: "osv^D"[i % 5] for i, B in enumerate(args.num_samples)}
        for (attn, B), line in lines.items():
            left.plot(line.keys(), line.values(), marker=shape[B], **STYLE[attn])
        for attn, line in state_size.items():
            right.plot(line.keys(), line.values(), marker="o", label=attn, **STYLE[attn])
        for B in sorted({B for _, B in lines}):
            left.scatter([], [], color="black", marker=shape[B], label=f"{B} at once")
        if lines:
            left.legend(fontsize="small")
            right.legend()

    measured = [dict(arm=attn, sequences=B, context=T, tokens_per_s=rate, state_bytes=state_size[attn][T])
                for (attn, B), line in lines.items() for T, rate in line.items()]  # fmt: skip
    publish(args.out, "decode", about, tables, draw, measured=measured)


# what the paper's measurements share: checkpoints, their data, and a look inside


def open_models(parser, args):
    """The checkpoints of --ckpt, {label: model on --device}. model.arm names all those that differ in the seed alone, or
    is the file's name where that tells nothing apart."""
    try:
        args.device = pick_device(args.device)
        args.ckpt = [path / "ckpt.pt" if path.is_dir() else path for path in args.ckpt]
        if len({path.resolve() for path in args.ckpt}) < len(args.ckpt):
            raise ValueError("--ckpt names a checkpoint twice")
        models = [GPT.load(path, args.device).eval() for path in args.ckpt]
        for path, model in zip(args.ckpt, models):
            if model.extra.get("tokenizer") not in ("gpt2", "bytes"):
                raise ValueError(f"{path} names no tokenizer of train.py's: this verb needs gpt2 or bytes")
            model.enc = get_tokenizer(model.extra["tokenizer"])
            if model.enc.n_vocab != model.config.vocab_size:
                raise ValueError(f"{path} has {model.config.vocab_size} tokens and its tokenizer {model.enc.n_vocab}")
            if not isinstance(model.extra.setdefault("run", {}), dict):
                raise ValueError(f"{path} holds a run that train.py did not write")
    except (ValueError, OSError) as e:
        parser.fail(str(e))
    found, seeds = [], {}
    for path, model in zip(args.ckpt, models):
        run = asdict(model.config) | model.extra["run"]
        key, seed = tuple((k, run.get(k)) for k in train.IDENTITY if k != "seed"), run.get("seed")
        found.append((model, key, seed, str(path.parent if path.name == "ckpt.pt" else path)))
        seeds.setdefault(key, []).append(seed)
    (label, _), named = telling_apart(seeds), {}
    for model, key, seed, file in found:
        once = seeds[key].count(seed) == 1
        model.arm = label(key) if once else file
        named[f"{model.arm}, seed {seed}" if once and len(seeds[key]) > 1 else model.arm] = model
    return named


def open_data(parser, args, models):
    """train and val of what the models were trained on, and T, their smallest block: the same tokens for every model."""
    first, runs = next(iter(models.values())), [model.extra["run"] for model in models.values()]
    path = args.data or runs[0].get("data")
    try:
        if path is None:
            raise ValueError(f"{args.ckpt[0]} does not say what it was trained on: name it with --data")
        train, val, tokenizer, what = load_data(None if str(path) == "pydoc_data.topics" else Path(path))
        for file, model, run in zip(args.ckpt, models.values(), runs):
            if model.extra["tokenizer"] != tokenizer:
                raise ValueError(f"{file} speaks {model.extra['tokenizer']}, and {what['data']} is in {tokenizer}")
            if args.data is None and run.get("data_sha256") != what["data_sha256"]:
                raise ValueError(f"{file} was trained on other data than {what['data']} is now: name some with --data")
    except (ValueError, OSError) as e:
        parser.fail(str(e))
    T = min(model.config.block_size for model in models.values())
    if not val.sequences(T) or int(max(a.max() for a in val.arrays if len(a))) >= first.config.vocab_size:
        parser.fail(f"the val split of {what['data']} has not one sequence of {T} tokens that the model knows")
    return train, val, what["data"], T


def batches(val, T, tokens, device):
    """The first sequences of val, about so many tokens: (B, T + 1) int64 at a time, B T at most 8,192 or B = 1."""
    n, B = max(1, min(val.sequences(T), tokens // T)), max(1, 8192 // T)
    for first in range(0, n, B):
        rows = [val.sequence(i, T) for i in range(first, min(first + B, n))]
        yield torch.from_numpy(np.stack(rows)).to(device)


@torch.no_grad()
def token_losses(model, tokens):
    """The loss in nats of each token of (B, T + 1) given those before it: (B, T) float32."""
    logits, _ = model(tokens[:, :-1], tokens[:, 1:])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)


@contextmanager
def watching(layers, look):
    """While it lasts, look(output) sees what each of layers gives."""
    hooks = [layer.register_forward_hook(lambda layer, inputs, output: look(output)) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def through_scores(model, look):
    """Runs the model through its maps, with look(depth, S) in the place of every layer's scores S (B, H, T, T)."""
    layers = [block.attn for block in model.blocks]
    before = [layer.flash for layer in layers]
    for depth, layer in enumerate(layers):
        layer.flash, plain = False, layer.scores
        layer.scores = lambda q, k, R, plain=plain, depth=depth: look(depth, plain(q, k, R))
    try:
        yield
    finally:
        for layer, flash in zip(layers, before):
            layer.flash = flash
            del layer.scores  # the class's own is back


@torch.no_grad()
def attention_maps(model, idx):
    """Every layer's map of idx (B, T): n_layer tensors (B, h, T, T)."""
    inputs = []
    with watching((block.norm1 for block in model.blocks), inputs.append):
        model(idx)
    return [block.attn.map(x) for block, x in zip(model.blocks, inputs)]


def default(args, cpu, cuda):
    """What --tokens or --limit is where it was not given."""
    return cuda if args.device.type == "cuda" else cpu


def line(models, label):
    """How one of the models is drawn: the attention's colour and dash, paler for a second arm of it; the label once."""
    attn, arm = models[label].config.attn, models[label].arm
    arms = {model.arm: model.config.attn for model in models.values()}
    alike, place = [a for a in arms if arms[a] == attn].index(arm), list(arms).index(arm)
    first = next(name for name, model in models.items() if model.arm == arm) == label
    return dict(STYLE[attn], marker="os^Dvx*P"[place % 8], markersize=4, alpha=1 / (1 + alike), label=arm if first else None)


def over_seeds(rows, models):
    """rows, with those rows or columns as one, mean and standard deviation, that differ in the seed alone."""

    def arm(name):
        label = next((label for label in models if name == label or name.startswith(f"{label}, ")), None)
        return name if label is None else models[label].arm + name[len(label) :]

    groups = {}
    for row in rows:
        same = tuple((k, arm(v) if k == "attn" else v) for k, v in row.items() if not isinstance(v, float))
        for k, v in row.items():
            if isinstance(v, float):
                groups.setdefault(same, {}).setdefault(arm(k), []).append(v)
    return [dict(same) | {k: summary(values) for k, values in cells.items()} for same, cells in groups.items()]


def show(args, models, tables, draw, raw=None, **more):
    """Publishes a measurement of checkpoints: first over the seeds, where there are several, then each for itself."""
    if len({model.arm for model in models.values()}) < len(models):
        means = {f"{caption}: mean ± standard deviation over seeds": over_seeds(rows, models) for caption, rows in tables.items()}
        tables = means | tables
    steps = {label: model.extra.get("step") for label, model in models.items()}
    trained = steps.popitem()[1] if len(set(steps.values())) == 1 else ", ".join(f"{k} {v}" for k, v in steps.items())
    about = conditions(args.device, dtype="float32", **more, **{"steps trained": trained})
    publish(args.out, args.verb, about, tables, draw, **raw or {})


# the verbs


def ngrams(tokens, n, base):
    """The number of the n-gram that ends at each token of (..., T) from the n-th on: (..., T - n + 1) int64."""
    T = tokens.shape[-1]
    return sum(tokens[..., i : T - n + 1 + i].astype(np.int64) * base ** (n - 1 - i) for i in range(n))


def frequent_ngrams(tokens, n, base):
    """The most frequent n-grams, which together are at most half of all in tokens (T,): their numbers, sorted, and k;
    they are those seen more than k times."""
    numbers, counts = np.unique(ngrams(tokens, n, base), return_counts=True)
    most = np.sort(counts)[::-1]
    k = int(most[np.searchsorted(most.cumsum(), counts.sum() / 2, side="right")])
    return numbers[counts > k], k


def seen_before(numbers):
    """Which entries of each row of (B, M) stood in that row before: (B, M) bool."""
    order = numbers.argsort(-1, kind="stable")
    ordered = np.take_along_axis(numbers, order, -1)
    again, seen = np.zeros(numbers.shape, bool), np.zeros(numbers.shape, bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    np.put_along_axis(seen, order, again, -1)
    return seen


def slices(p, args):
    """val loss of what the context held before, and of the rest (Table 6; Zoology, arXiv 2312.04927)

    An AR-hit is a token that ends an n-gram which its context holds already, so that it could be looked up there, and
    which is not among the n-grams most frequent in the training data, which need no looking up: those that together
    make up half of it. n = 2 for gpt2 tokens and 5 for bytes. (Zoology leaves out what was seen 1,250 times, whatever
    the size of the data.)"""
    models = open_models(p, args)
    train, val, data, T = open_data(p, args, models)
    enc = next(iter(models.values())).enc
    n = 2 if enc.name == "gpt2" else 5
    counted, missing = [], args.count
    for a in train.arrays:
        counted.append(a[:missing])
        missing -= len(counted[-1])
    counted = np.concatenate(counted)
    if len(counted) < n:
        p.fail(f"{len(counted)} training tokens hold no {n}-gram: count more with --count")
    frequent, k = frequent_ngrams(counted, n, enc.n_vocab)
    tokens, hits, losses = args.tokens or default(args, 65_536, 4_000_000), [], {label: [] for label in models}
    for batch in batches(val, T, tokens, args.device):
        numbers = ngrams(batch.numpy(force=True), n, enc.n_vocab)
        hit = np.zeros((len(batch), T), bool)
        hit[:, n - 2 :] = seen_before(numbers) & ~np.isin(numbers, frequent)
        hits.append(hit)
        for label, model in models.items():
            losses[label].append(token_losses(model, batch).numpy(force=True))
    hits, rows = np.concatenate(hits), []
    for label in models:
        loss = np.concatenate(losses[label])
        rows.append({"attn": label, "all": loss.mean().item(), "AR-hits": loss[hits].mean().item() if hits.any() else None,
                     "the rest": loss[~hits].mean().item()})  # fmt: skip

    def draw(figure):
        ax, means = figure.subplots(), over_seeds(rows, models)
        for i, row in enumerate(means):
            style = next(line(models, label) for label, model in models.items() if model.arm == row["attn"])
            places = np.arange(3) + (i - (len(means) - 1) / 2) * 0.8 / len(means)
            heights, errors = zip(*(row[name] or (0, None) for name in ("all", "AR-hits", "the rest")))
            ax.bar(places, heights, 0.75 / len(means), yerr=[e or 0 for e in errors], color=style["color"], label=row["attn"],
                   alpha=style["alpha"], hatch="//" if style["linestyle"] == "--" else None, edgecolor="white")  # fmt: skip
        ax.set_xticks(range(3), ["all", f"AR-hits ({hits.mean():.1%})", f"the rest ({1 - hits.mean():.1%})"])
        ax.set_ylabel("val loss (nats per token)")
        ax.legend()

    rule = f"{n}-grams seen more than {k:,} times in the first {len(counted):,} training tokens"
    caption = f"val loss in nats per token; {hits.mean():.1%} of the tokens are AR-hits"
    show(args, models, {caption: rows}, draw, dict(k=k, n=n), data=data, tokens=f"{hits.size:,}", context=T, **{"not a hit": rule})


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


def position(p, args):
    """mean loss by position in the text, up to and beyond the trained block (Figure 4)

    Every arm sees its whole context; the softmax arms also as sample.py runs them, whose cache starts anew from its last
    half whenever it is full."""
    models = open_models(p, args)
    _, val, data, T = open_data(p, args, models)
    if len({model.config.block_size for model in models.values()}) > 1:
        p.fail("checkpoints trained on blocks of different lengths: compare them one by one")
    L = args.length or 4 * T
    if not val.sequences(L):
        p.fail(f"the val split of {data} has {val.tokens:,} tokens, fewer than --length={L} and one: choose a smaller one")
    tokens = args.tokens or default(args, 65_536, 4_000_000)
    curves = {}  # the sum of the losses of each position
    for batch in batches(val, L, tokens, args.device):
        for label, model in models.items():
            ways = {label: token_losses}
            if isinstance(model.blocks[0].attn, Softmax):
                ways[f"{label}, window"] = windowed_losses
            for name, losses in ways.items():
                curves[name] = curves.get(name, 0) + losses(model, batch).double().sum(0).cpu().numpy()
    n = max(1, min(val.sequences(L), tokens // L))
    ends = sorted({min(L, 2**i) for i in range(4, 64) if 2 ** (i - 1) < L} | {min(T, L)})
    upto, between = [], []
    for start, end in zip([0, *ends], ends):
        upto.append({"position": end} | {name: float(c[:end].sum() / n / end) for name, c in curves.items()})
        means = {name: float(c[start:end].mean() / n) for name, c in curves.items()}
        between.append({"positions": f"{start + 1:,} to {end:,}"} | means)

    def draw(figure):
        ax = figure.subplots()
        for name, c in curves.items():
            style = line(models, name.removesuffix(", window"))
            if name not in models:
                style |= dict(linestyle=":", label=style["label"] and f"{style['label']}, window")
            ax.plot(np.arange(1, L + 1), c.cumsum() / n / np.arange(1, L + 1), markevery=(0.1, 0.1), **style)
        ax.axvline(T, color="grey", linewidth=0.8)
        ax.text(T, ax.get_ylim()[0], "trained block ", ha="right", va="bottom", color="grey")
        ax.set(xscale="log", xlabel="position (tokens)", ylabel="mean loss up to it (nats per token)")
        figure.legend(loc="outside right center")

    show(args, models, {"Mean loss up to a position (nats per token)": upto, "Mean loss between positions": between}, draw,
         dict(by_position={name: (c / n).tolist() for name, c in curves.items()}),
         data=data, tokens=f"{n * L:,}", **{"trained block": T})  # fmt: skip


class Extremes:
    """Of all numbers that pass: the 100 largest absolute values, and the median of the absolute values, read off a
    histogram with 64 bins an octave and so within 0.6 %."""

    def __init__(self):
        self.top, self.histogram = torch.empty(0), torch.zeros(64 * 64, dtype=torch.float64)

    def add(self, x):
        x = x.abs().flatten().float()
        self.top = torch.cat((self.top, x.topk(min(100, len(x))).values.cpu())).sort(descending=True).values[:100]
        for part in x.clamp(2.0**-31.9, 2.0**31.9).log2().split(2**24):  # histc counts in float32
            self.histogram += torch.histc(part, 64 * 64, -32, 32).double().cpu()

    def row(self):
        sums = self.histogram.cumsum(0)
        middle = (int(torch.searchsorted(sums, sums[-1] / 2)) + 0.5) / 64 - 32
        return {f"top-{k}": self.top[k - 1].item() if len(self.top) >= k else None for k in (1, 2, 3, 10, 100)} | {
            "median": math.nan if self.top.isnan().any() else 2**middle}  # fmt: skip


@torch.no_grad()
def outliers(p, args):
    """the largest scores and activations beside their median (Table 5)

    Absolute values: of what layer.scores gives below and on the diagonal (attention logits in the softmax arms, rotated
    products of features before the division in the linear ones), for each branch of a difference; and of the residual
    stream after each block. Over all layers, heads and tokens; --tokens is 4e5 on a GPU."""
    models = open_models(p, args)
    _, val, data, T = open_data(p, args, models)
    tokens, found = args.tokens or default(args, 32_768, 400_000), {}
    for label, model in models.items():
        branches = [", branch 1", ", branch 2"] if model.blocks[0].attn.branches == 2 else [""]
        scores = [found.setdefault(("scores" + branch, label), Extremes()) for branch in branches]
        stream = found.setdefault(("residual stream", label), Extremes())

        def look(depth, S):
            causal = torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).tril()
            for i, extremes in enumerate(scores):
                extremes.add(S[:, i :: len(scores)][..., causal])
            return S

        with through_scores(model, look), watching(model.blocks, stream.add):
            n = sum(model(batch[:, :-1])[0].shape[0] for batch in batches(val, T, tokens, args.device))
    rows = [{"of": kind, "attn": label} | extremes.row() for (kind, label), extremes in found.items()]
    rows.sort(key=lambda row: row["of"] == "residual stream")

    def draw(figure):
        for ax, kind in zip(figure.subplots(1, 2), ("scores", "residual stream")):
            for (name, label), extremes in found.items():
                if name.startswith(kind):
                    style = line(models, label) | dict(marker=None, linewidth=1 + name.endswith("1"))
                    style["label"] = style["label"] and style["label"] + name.removeprefix(kind)
                    ax.plot(range(1, len(extremes.top) + 1), extremes.top, **style)
                    ax.plot([1, 100], [extremes.row()["median"]] * 2, **style | dict(linestyle=":", label=None))
            ax.set(xscale="log", yscale="log", xlabel="rank; dotted: the median", ylabel=f"absolute value: {kind}")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)

    show(args, models, {"The largest absolute values and the median": rows}, draw, data=data, tokens=f"{n * T:,}", context=T)


@torch.no_grad()
def residual(p, args):
    """norm of the residual stream by layer, at init and at the end

    The length ||x|| of a token's residual stream as the embedding and then each block leave it, the mean over val tokens.
    At init: the same weights drawn anew from the run's seed. A lead on what the norm on each head's output costs early
    in training: `python bench.py residual --ckpt out/diff out/diff-nosubln`."""
    models = open_models(p, args)
    _, val, data, T = open_data(p, args, models)
    tokens, rows = args.tokens or default(args, 32_768, 400_000), []
    for label, model in models.items():
        seed = model.extra["run"].get("seed")
        if seed is None:
            p.fail(f"{label} does not say its seed, as checkpoints of train.py do: its init is unknown")
        for when, one in (("init", GPT(model.config, seed).to(args.device)), ("end", model)):
            sums, n = [0.0] * (1 + model.config.n_layer), 0
            for batch in batches(val, T, tokens, args.device):
                stream = []
                with watching((one.wte, *one.blocks), stream.append):
                    one(batch[:, :-1])
                sums = [s + x.norm(dim=-1).sum().item() for s, x in zip(sums, stream)]
                n += batch.shape[0] * T
            rows.append({"attn": label, "at": when, "embedding": sums[0] / n})
            rows[-1] |= {f"block {depth}": s / n for depth, s in enumerate(sums[1:])}

    def draw(figure):
        for ax, when in zip(figure.subplots(1, 2, sharey=True), ("init", "end")):
            for label in models:
                norms = [list(row.values())[2:] for row in rows if (row["attn"], row["at"]) == (label, when)]
                ax.plot(range(len(norms[0])), norms[0], **line(models, label))
            ax.set(title=f"at {when}", xlabel="after how many blocks", yscale="log")
            ax.locator_params(axis="x", integer=True)
        figure.axes[0].set_ylabel("norm of the residual stream")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)

    show(args, models, {"Norm of the residual stream, mean over tokens": rows}, draw, data=data, tokens=f"{n:,}", context=T)


def absmax(S, bits, dims):
    """S rounded to 2^(bits - 1) - 1 steps either side of zero, the largest absolute value over dims being the last.
    Only entries on and below the diagonal count: the rest is never looked at."""
    step = S.tril().abs().amax(dims, keepdim=True).clamp(min=1e-30) / (2 ** (bits - 1) - 1)
    return (S / step).round() * step


@torch.no_grad()
def quant(p, args):
    """val loss with the scores rounded to few bits (Figure 8)

    What layer.scores gives is rounded to 2^(bits - 1) - 1 steps either side of zero, the largest absolute value being
    the last step: of each text and layer, all heads and branches together, or with --per=head of each head. Nothing
    else is quantized. HellaSwag for gpt2 checkpoints, as the verb hellaswag has it."""
    models = open_models(p, args)
    _, val, data, T = open_data(p, args, models)
    dims, tokens = ((1, 2, 3) if args.per == "layer" else (2, 3)), args.tokens or default(args, 16_384, 1_000_000)
    limit = default(args, 100, 1000) if args.limit is None else args.limit
    questions = open_hellaswag(p, args.source, limit) if limit and next(iter(models.values())).enc.name == "gpt2" else []
    rows, n = [], 0
    for bits in (None, 8, 6, 4):
        row, right = {"bits": bits or "not quantized"}, {}
        for label, model in models.items():
            with through_scores(model, lambda depth, S: S if bits is None else absmax(S, bits, dims)):
                losses = [token_losses(model, batch).double() for batch in batches(val, T, tokens, args.device)]
                row[label], n = torch.cat(losses).mean().item(), sum(x.numel() for x in losses)
                if questions:
                    right[f"{label}, HellaSwag"] = score_hellaswag(model, questions, T)["accuracy, normalised"]
        rows.append(row | right)

    def draw(figure):
        panels = {"val loss above that of exact scores (nats)": ""}
        panels |= {"HellaSwag accuracy": ", HellaSwag"} if questions else {}
        for ax, (ylabel, suffix) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
            for label in models:
                zero = 0 if suffix else rows[0][label]
                ax.plot(range(4), [row[label + suffix] - zero for row in rows], **line(models, label))
            ax.set_xticks(range(4), ["none", "8", "6", "4"])
            ax.set(xlabel="bits of the scores", ylabel=ylabel)
            ax.legend()

    above = [{k: v - rows[0][k] if k in models else v for k, v in row.items() if k in models or k == "bits"} for row in rows[1:]]
    more = {"HellaSwag rows": len(questions)} if questions else {}
    each = "each text, layer and head" if args.per == "head" else "each text and layer"
    tables = {"val loss in nats per token, scores quantized": rows, "the same above that of exact scores": above}
    show(args, models, tables, draw, data=data, tokens=f"{n:,}", context=T, absmax=f"of {each}", **more)


def open_hellaswag(parser, source, limit):
    """The first rows of the validation split: dicts of ctx, four endings and the right one's number, label."""
    logging.disable()  # the libraries' retries, which end in our one line
    try:
        import datasets

        datasets.disable_progress_bars()
        found = datasets.load_dataset(source, split="validation")
        found = found.select_columns(["ctx", "endings", "label"]).select(range(min(limit, len(found)))).to_list()
        if not found or not all(len(row["endings"]) == 4 and str(row["label"]) in set("0123") for row in found):
            raise ValueError("it needs rows with four endings and a label")
        return found
    except Exception as e:  # no network, no folder, other columns: of many classes
        parser.fail(f"can't read HellaSwag from {source} ({' '.join(str(e).split())[:150]}): a folder will do, --source=…"
                    + " (pip install datasets)" * isinstance(e, ImportError) + " (or --limit=0: quant without it)" * parser.prog.endswith("quant"))


@torch.no_grad()
def score_hellaswag(model, rows, block):
    """Zero-shot: a row is right when the right ending is the likeliest, by the sum of its tokens' losses ("accuracy") or
    by their mean ("normalised"). A context too long for the block is cut from the left.

    Endings of one length go through the model together: then nothing is padded, and nothing can leak from a pad."""
    texts, cut = {}, 0
    for i, row in enumerate(rows):
        context, longest = model.enc.encode_ordinary(row["ctx"]), 0
        for j, ending in enumerate(row["endings"]):
            ending = model.enc.encode_ordinary(" " + ending)
            text = (context + ending)[-block - 1 :]
            longest = max(longest, len(context) + len(ending))
            texts.setdefault(len(text), []).append((i, j, text, min(len(ending), len(text) - 1)))
        cut += longest > block + 1
    total, mean = torch.zeros(len(rows), 4), torch.zeros(len(rows), 4)
    for length, group in texts.items():
        size = max(1, 8192 // length)
        for first in range(0, len(group), size):
            part = group[first : first + size]
            losses = token_losses(model, torch.tensor([text for _, _, text, _ in part], device=model.wte.weight.device))
            for (i, j, _, m), loss in zip(part, losses.cpu()):
                total[i, j], mean[i, j] = loss[-m:].sum(), loss[-m:].mean()
    label = torch.tensor([int(row["label"]) for row in rows])
    plain, normalised = ((x.argmin(1) == label).float().mean().item() for x in (total, mean))
    error = math.sqrt(normalised * (1 - normalised) / len(rows))
    return {"accuracy, normalised": normalised, "standard error": error, "accuracy": plain, "contexts cut": cut}


def hellaswag(p, args):
    """zero-shot accuracy on HellaSwag, 10,042 unfinished stories with four endings (Section 3.1)

    Normalised accuracy: the ending whose tokens have the smallest mean loss, after the context and a space; beside it
    the accuracy by the sum of the losses. Guessing gets 0.25."""
    models = open_models(p, args)
    questions = open_hellaswag(p, args.source, args.limit)
    block = min(model.config.block_size for model in models.values())
    rows = [{"attn": label, "rows": len(questions)} | score_hellaswag(models[label], questions, block) for label in models]

    def draw(figure):
        ax = figure.subplots()
        for i, row in enumerate(rows):
            ax.errorbar(i, row["accuracy, normalised"], row["standard error"], capsize=4, **line(models, row["attn"]))
        ax.axhline(0.25, color="grey", linewidth=0.8)
        ax.text(-0.48, 0.25, "guessing", va="bottom", color="grey")
        ax.set_xticks(range(len(rows)), [row["attn"] for row in rows], rotation=20, ha="right")
        ax.set(ylabel="HellaSwag, normalised accuracy ± 1 standard error", xlim=(-0.5, len(rows) - 0.5))

    show(args, models, {"HellaSwag, zero-shot": rows}, draw, source=args.source, context=block, normalised="per token")


def draw_map(ax, A, largest, names=None):
    """One signed map (T, T): purple above zero, orange below, white at zero and above the diagonal."""
    A = np.ma.masked_where(np.triu(np.ones(A.shape, bool), 1), A)
    image = ax.imshow(A, cmap="PuOr", vmin=-largest, vmax=largest, interpolation="nearest")
    if names:
        ax.set_xticks(range(len(names)), names, fontsize=6)
        ax.set_yticks(range(len(names)), names, fontsize=6)
    else:
        ax.tick_params(labelsize=6)
    return image


@torch.no_grad()
def maps(p, args):
    """the attention maps of a text, heads averaged and one by one (Figure 1)

    Row i is how token i mixes the tokens before it; what is subtracted more than it is added is negative. The table is
    of all layers, the figure of one."""
    models = open_models(p, args)
    layers = min(model.config.n_layer for model in models.values())
    if (args.layer or 1) > layers:
        p.fail(f"--layer={args.layer}: there are {layers}")
    layer, shown, rows = args.layer or layers, {}, []
    for label, model in models.items():
        tokens = model.enc.encode_ordinary(args.text)
        if not 1 < len(tokens) <= 256:
            p.fail(f"--text has {len(tokens)} tokens, and a map to look at needs 2 to 256")
        found = [A[0].float().cpu() for A in attention_maps(model, torch.tensor([tokens], device=args.device))]
        names = [model.enc.decode([t]).replace(" ", "␣").replace("\n", "↵").replace("$", r"\$") for t in tokens]
        shown[label] = found[layer - 1], names if len(names) <= 32 else None
        for depth, A in enumerate(found):
            size = A.abs().sum(-1)
            numbers = {"smallest": A.min(), "largest": A.max(), "sum of a row": A.sum(-1).mean(),
                       "negative share": (-A).clamp(min=0).sum() / size.sum(),
                       "on the first token": (A[..., 0].abs() / size).mean()}  # fmt: skip
            rows.append({"attn": label, "layer": depth + 1, "heads": len(A)} | {key: x.item() for key, x in numbers.items()})

    def draw(figure):
        of = {label: one for label, one in shown.items() if line(models, label)["label"]}  # the first of each arm's seeds
        heads = max(len(A) for A, _ in of.values())
        figure.set_size_inches(3.2 * len(of) + 0.8, 2.9 * (1 + heads))
        axes = figure.subplots(1 + heads, len(of), squeeze=False)
        largest = torch.cat([A[A != 0].abs() for A, _ in of.values()]).quantile(0.99).item()
        for column, (label, (A, names)) in zip(axes.T, of.items()):
            for ax in column[1 + len(A) :]:
                ax.axis("off")
            for i, (ax, B) in enumerate(zip(column, [A.mean(0), *A])):
                image = draw_map(ax, B.numpy(), largest, names)
                ax.set_title(f"{label}, head {i}" if i else f"{label}, layer {layer}, mean of {len(A)} heads", fontsize=9)
        figure.colorbar(image, ax=axes, shrink=0.4, extend="both", label="weight (1 % are beyond the ends)")
        axes[0, 0].set(xlabel="attended token", ylabel="token")

    show(args, models, {"Attention maps (shares are of absolute values)": rows}, draw,
         dict(maps={label: A.tolist() for label, (A, _) in shown.items()}), text=repr(args.text))  # fmt: skip


# recall: the task, the models and the grid, all of it fixed before any arm but softmax was looked at
KEYS, VALUES, FILLERS = 16, 16, 32  # token numbers: the keys, then the values, then the fillers
RECALL_T = 64  # tokens of a text in training, at most
RECALL_STEPS, RECALL_DENSE = 1000, 300  # without fillers at first (0.3 of fewer steps); more and more until half-way
RECALL_MODEL = dict(n_layer=2, n_head=4, n_embd=64, block_size=RECALL_T, vocab_size=KEYS + VALUES + FILLERS)
RECALL_GAIN = 4.0  # the matrices start so much larger: 0.02 is made for 768 channels, and 1 / sqrt(64) is 0.125
RECALL_BATCH, RECALL_LR, RECALL_WARMUP = 64, 1e-3, 50
NEEDLES = (1, 2, 4, 8)  # N in training, drawn anew each step; all are asked for
GRID = [(N, R) for N in (*NEEDLES, 12) for R in (1, 2, 4) if R <= N]  # 12: beyond training
DEPTHS, LENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0), (32, 64, 128, 256, 512)
DEPTH_N = 4  # needles in the grids by depth and length, of which one is asked for
ORDERS, SETS = 10, 2  # shufflings of the same needles, and how many times that is done
RECALL_TEXTS = 256  # texts behind a figure


def recall_texts(generator, B, T, N, R, depth=None, needles=None):
    """B texts of T tokens, (B, T), and where their needles begin, (B, N).

    N needles, a key and its value each, at random places among T - 2 R - 2 N fillers; then R of the keys, each once and
    followed by its value. depth: where the first that is asked for lies, from 0 (the text's beginning) to 1 (just before
    the first query). needles: keys and values (N,) in the order in which every text has them; else drawn for each."""
    end = T - 2 * R
    lot = torch.rand(B, end - N, generator=generator)  # of the places, a needle taking one
    if depth is not None:
        lot[:, round(depth * (end - N - 1))] = -1  # the first to be drawn
    place = lot.argsort(-1)[:, :N]
    place = place + place.argsort(-1).argsort(-1)  # those before it take two tokens
    if needles is None:
        key = torch.rand(B, KEYS, generator=generator).argsort(-1)[:, :N]
        value = KEYS + torch.randint(VALUES, (B, N), generator=generator)
    else:
        order = torch.rand(B, N, generator=generator).argsort(-1)
        place = place.sort(-1).values.gather(1, order)
        key, value = needles[0][order], needles[1][order]
    text = KEYS + VALUES + torch.randint(FILLERS, (B, T), generator=generator)
    text.scatter_(1, place, key).scatter_(1, place + 1, value)
    text[:, end:] = torch.stack((key[:, :R], value[:, :R]), -1).flatten(1)
    return text, place


@torch.no_grad()
def recall_accuracy(model, device, T, N, R, seed=0, **how):
    """The share of the answers of RECALL_TEXTS texts that get the highest logit, given the right answers before them."""
    text, _ = recall_texts(torch.Generator().manual_seed(seed), RECALL_TEXTS, T, N, R, **how)
    text, right = text.to(device), 0
    for part in text.split(max(1, 8192 // T)):
        logits, _ = model(part[:, :-1], part[:, 1:])
        right += (logits[:, T - 2 * R :: 2].argmax(-1) == part[:, T - 2 * R + 1 :: 2]).sum().item()
    return right / (RECALL_TEXTS * R)


@torch.no_grad()
def attention_shares(model, device, T, N, depth):
    """The shares of the last token's attention, the query, on the answer's span (its key and value) and on the noise
    (everything else before the query): absolute values, each row's made to sum to 1, the mean over layers, heads, texts."""
    text, place = recall_texts(torch.Generator().manual_seed(1), RECALL_TEXTS, T, N, 1, depth)
    rows = [A[:, :, -1].abs() for A in attention_maps(model, text[:, :-1].to(device))]  # (B, h, T - 1) of each layer
    share = torch.stack([(row / row.sum(-1, keepdim=True)).mean(1) for row in rows]).mean(0).cpu()  # (B, T - 1)
    answer = (share.gather(1, place[:, :1]) + share.gather(1, place[:, :1] + 1)).mean().item()
    return answer, share[:, : T - 2].sum(-1).mean().item() - answer


def recall_run(attn, seed, steps, device, tick):
    """Trains one model and measures it: a dict of what the tables need. tick() is called after each step."""
    model = GPT(GPTConfig(attn=attn, **RECALL_MODEL), seed)
    with torch.no_grad():
        for w in model.parameters():
            w.mul_(RECALL_GAIN if w.ndim == 2 else 1)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECALL_LR, betas=(0.9, 0.95), weight_decay=0.1)
    generator, curve, dense = torch.Generator().manual_seed(seed), [], min(RECALL_DENSE, 0.3 * steps)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RECALL_LR * min(1, (step + 1) / RECALL_WARMUP, 2 - 2 * step / steps)
        N = NEEDLES[int(torch.randint(len(NEEDLES), (), generator=generator))]
        fillers = (RECALL_T - 4 * N) * min(1, max(0, (step - dense) / (steps / 2 - dense)))
        T = 4 * N + int(torch.randint(int(fillers) + 1, (), generator=generator))
        text, _ = recall_texts(generator, RECALL_BATCH, T, N, N)
        targets = torch.full_like(text[:, 1:], -100)  # cross_entropy passes over these
        targets[:, T - 2 * N :: 2] = text[:, T - 2 * N + 1 :: 2]
        _, loss = model(text[:, :-1].to(device), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if N == NEEDLES[-1]:
            curve.append((step + 1, loss.item()))
        tick()
    orders = []
    for number in range(SETS):
        g = torch.Generator().manual_seed(number)
        N = NEEDLES[-1]
        needles = torch.randperm(KEYS, generator=g)[:N], KEYS + torch.randint(VALUES, (N,), generator=g)
        shuffled = [[x[order] for x in needles] for order in (torch.randperm(N, generator=g) for _ in range(ORDERS))]
        orders.append([recall_accuracy(model, device, RECALL_T, N, N, needles=x) for x in shuffled])
    example, _ = recall_texts(torch.Generator().manual_seed(2), 1, RECALL_T, DEPTH_N, 1, 0.5)
    return dict(
        attn=attn, seed=seed, curve=curve, orders=orders, example=example[0].tolist(),
        parameters=sum(w.numel() for w in model.parameters()),
        needles={f"N={N} R={R}": recall_accuracy(model, device, RECALL_T, N, R) for N, R in GRID},
        depths=[[recall_accuracy(model, device, T, DEPTH_N, 1, depth=depth) for T in LENGTHS] for depth in DEPTHS],
        shares=[attention_shares(model, device, RECALL_T, DEPTH_N, depth) for depth in DEPTHS],
        map=[A[0].mean(0).tolist() for A in attention_maps(model, example[:, :-1].to(device))],
    )  # fmt: skip


def recall_worker(counter):
    """A process of its own for one run at a time: one thread, since models this small have nothing to share."""
    global recall_counter
    torch.set_num_threads(1)
    recall_counter = counter


def recall_job(job):
    def tick():
        with recall_counter.get_lock():
            recall_counter.value += 1

    return recall_run(*job, tick)


def recall_runs(jobs, steps, procs):
    """Every job's result, in order; procs of them at a time, under one progress bar."""
    from tqdm import tqdm

    with tqdm(total=len(jobs) * steps, unit="step", disable=None, smoothing=0.02) as bar:
        if procs == 1:
            torch.set_num_threads(1)  # as in the workers: the same bits
            return [recall_run(*job, bar.update) for job in jobs]
        spawn = multiprocessing.get_context("spawn")
        counter = spawn.Value("q", 0)
        with spawn.Pool(procs, recall_worker, (counter,)) as pool:
            results = pool.map_async(recall_job, jobs, chunksize=1)
            while not results.ready():
                results.wait(1)
                bar.update(counter.value - bar.n)
            return results.get()


def recall(p, args):
    """trains tiny models of every arm on recall among noise (Tables 2 and 3, Figures 1, 5 and 7)

    A text holds N needles, a key and its value each, among fillers; at its end stand R of the keys, and after each of
    them its value must come. What is measured, on a grid that is fixed and shown whole: accuracy by N and R; by the depth
    of the needle and the length of the text, also beyond the trained one; the share of the attention on the answer and on
    the noise; how much the order of the same needles matters; one example's maps. The settings stand at the top of the
    verb in bench.py. They are the same for every arm and were chosen on softmax."""
    try:
        args.device = pick_device(args.device)
    except ValueError as e:
        p.fail(str(e))
    jobs = [(attn, seed, args.steps, args.device) for seed in range(args.seeds) for attn in ATTENTION]
    began = time.time()
    runs = recall_runs(jobs, args.steps, min(args.procs, len(jobs)))
    of = {attn: [run for run in runs if run["attn"] == attn] for attn in ATTENTION}

    learnt = lambda run: next((step for step, loss in run["curve"] if loss < 0.1), None)
    each = [{"attn": attn, "seed": run["seed"], "learnt": learnt(run)} | {NR: (a, None) for NR, a in run["needles"].items()}
            for attn in of for run in of[attn]]  # fmt: skip
    by_length = [{"attn": attn, "depth": f"{depth:.0%}"} | {f"T={T}": summary([run["depths"][i][j] for run in of[attn]])
                 for j, T in enumerate(LENGTHS)} for attn in of for i, depth in enumerate(DEPTHS)]  # fmt: skip
    shares = [{"attn": attn, "attention on": what} | {f"{depth:.0%}": summary([run["shares"][i][k] for run in of[attn]])
              for i, depth in enumerate(DEPTHS)} for k, what in enumerate(("answer", "noise")) for attn in of]  # fmt: skip
    orders = []
    for attn in of:
        sets = [accuracies for run in of[attn] for accuracies in run["orders"]]
        best, worst = ([f(accuracies) for accuracies in sets] for f in (max, min))
        orders.append({"attn": attn, "best": summary(best), "worst": summary(worst),
                       "best - worst": summary([b - w for b, w in zip(best, worst)])})  # fmt: skip

    def draw(figure):
        figure.set_size_inches(15, 11)
        axes, n, numbers = figure.subplots(3, 4), NEEDLES[-1], sorted({N for N, _ in GRID})
        for attn, style in STYLE.items():
            for run in of[attn]:
                axes[0, 0].plot(*zip(*run["curve"]), label=attn if run is of[attn][0] else None, linewidth=0.8, **style)
            accuracy = [[run["needles"][f"N={N} R={min(N, 4)}"] for N in numbers] for run in of[attn]]
            answer, noise = np.transpose([run["shares"] for run in of[attn]], (2, 0, 1))  # (seeds, depths) each
            for ax, x, ys in zip(axes[0, 1:], (numbers, DEPTHS, DEPTHS), (accuracy, answer, noise)):
                ax.plot(x, np.mean(ys, 0), **style)
                for y in ys:
                    ax.plot(x, y, ".", color=style["color"], markersize=4)
        axes[0, 0].set(xlabel="step", ylabel=f"training loss, N = {n} (nats per answer)", ylim=(0, None))
        axes[0, 0].legend(fontsize="small")
        axes[0, 1].set(xlabel=f"needles N (trained up to {n}), R = min(N, 4)", ylabel="accuracy", ylim=(0, 1.05))
        axes[0, 1].set_title("dots: seeds", fontsize="small")
        axes[0, 2].set(xlabel="depth of the answer", ylabel="attention on the answer", ylim=(0, None))
        axes[0, 3].set(xlabel="depth of the answer", ylabel="attention on the noise", ylim=(0, None))
        for ax, attn in zip(axes[1], of):
            mean = np.mean([run["depths"] for run in of[attn]], 0)
            image = ax.imshow(mean, cmap="cividis", vmin=0, vmax=1, aspect="auto")
            for (i, j), a in np.ndenumerate(mean):
                ax.text(j, i, f"{a:.2f}", ha="center", va="center", fontsize=7, color="white" if a < 0.6 else "black")
            ax.set_xticks(range(len(LENGTHS)), LENGTHS)
            ax.set_yticks(range(len(DEPTHS)), [f"{depth:.0%}" for depth in DEPTHS])
            ax.set(title=f"{attn}: accuracy, N = {DEPTH_N}", ylabel="depth")
            ax.set_xlabel(f"length (tokens; trained up to {RECALL_T})")
        figure.colorbar(image, ax=axes[1], shrink=0.8)
        shown = {attn: np.array(of[attn][0]["map"][-1]) for attn in of}
        largest = np.quantile(np.abs(np.concatenate([A[A != 0] for A in shown.values()])), 0.995)
        for ax, (attn, A) in zip(axes[2], shown.items()):
            image = draw_map(ax, A, largest)
            for needle in (t for t, token in enumerate(runs[0]["example"][:-2]) if token < KEYS):
                ax.axvline(needle + 0.5, color="grey", linewidth=0.3)  # between key and value
            ax.set(title=f"{attn}: last layer, mean of heads", xlabel="attended token", ylabel="token; the last asks")
        figure.colorbar(image, ax=axes[2], shrink=0.8, extend="both", label="weight")

    sizes = sorted({run["parameters"] for run in runs})
    model = f"{RECALL_MODEL['n_layer']} layers, {RECALL_MODEL['n_head']} heads, {RECALL_MODEL['n_embd']} channels"
    how = dict(model=f"{model}, {sizes[0]:,} to {sizes[-1]:,} parameters", keys=KEYS, values=VALUES, fillers=FILLERS,
               training=f"{args.steps:,} steps of {RECALL_BATCH} texts of up to {RECALL_T} tokens, rate {RECALL_LR:g}",
               seeds=args.seeds, texts=RECALL_TEXTS, processes=min(args.procs, len(runs)),
               minutes=f"{(time.time() - began) / 60:.1f}")  # fmt: skip
    tables = {
        f"Accuracy by needles N and queries R, T = {RECALL_T} (guessing among the values: {1 / VALUES:.3f}); learnt: the "
        f"first step whose training loss with N = {NEEDLES[-1]} is below 0.1": each,
        f"Accuracy by depth and length T, N = {DEPTH_N}, R = 1, mean ± standard deviation over seeds": by_length,
        f"Attention of the query by the answer's depth, T = {RECALL_T}, N = {DEPTH_N}, R = 1": shares,
        f"Accuracy over {ORDERS} orders of the same {NEEDLES[-1]} needles, {SETS} sets a seed": orders,
    }
    publish(args.out, "recall", conditions(args.device, **how), tables, draw, runs=runs)


def main(argv=None):
    wide = lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=20)
    p = Parser(prog="bench.py", description=__doc__, formatter_class=wide)
    verbs = p.add_subparsers(dest="verb", required=True, metavar="verb")

    def verb(function):
        """The parser of one verb, whose help is the function's docstring."""
        doc = inspect.cleandoc(function.__doc__)
        q = verbs.add_parser(function.__name__, help=doc.splitlines()[0], description=doc,
                             formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        q.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of what is written, in the place of an earlier "
                       "run of the verb (out/bench)")
        q.set_defaults(function=function, parser=q)
        return q

    q = verb(loss)
    q.add_argument("runs", nargs="*", type=Path, default=[Path("out")], help="folders of runs, or folders of those (out)")
    q = verb(ablations)
    q.add_argument("--preset", choices=train.PRESETS, default="toy", help="toy or gpt2 (toy)")
    q.add_argument("--seed", type=several(whole), default=[1, 2, 3], help="a comma list (1,2,3)")

    both = argparse.BooleanOptionalAction
    for q, repeats in ((verb(speed), 7), (verb(decode), 5)):
        q.add_argument("--arms", type=several(one_of(ATTENTION)), default=list(ATTENTION), help="a comma list (all four)")
        q.add_argument("--T", type=several(count), help="lengths, a comma list (1024 to 16384 on cuda, less on a cpu)")
        q.add_argument("--repeats", type=count, default=repeats, help=f"timings of each ({repeats})")
        q.add_argument("--preset", choices=("toy", "gpt2"), help="train.py's, for the model's size (gpt2 on cuda, else toy)")
        for name, what in (("n_layer", "blocks"), ("n_head", "heads of the softmax model"), ("n_embd", "channels")):
            q.add_argument(f"--{name}", type=count, help=f"{what} (the preset's)")
        q.add_argument("--flash", action=both, default=True, help="the fast form of the attention, or the map (fast)")
        q.add_argument("--device", help="cuda, cpu, … (cuda where there is one)")
        q.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the matmuls (bfloat16 on cuda)")
        q.add_argument("--compile", action=both, help="torch.compile (on cuda)")
        if q.get_default("function") is speed:
            q.add_argument("--kernel", type=several(one_of(("auto", *KERNELS))), default=["auto"], help="a comma list of "
                           f"{', '.join(KERNELS)} and auto for the softmax family; linear arms have none (auto)")  # fmt: skip
            q.add_argument("--train_T", type=several(count), help="those of the training step (256, 1024 and 4096, if in --T)")
            q.add_argument("--batch_size", type=count, help="sequences of the preset's block_size in a call (the preset's)")
            q.add_argument("--nanogpt", type=Path, help="karpathy/nanoGPT's model.py, to time its training step beside ours")
            q.add_argument("--profile", action="store_true", help="only torch.profiler's table of one step of each arm")
        else:
            q.add_argument("--num_samples", type=several(count), default=[1, 8, 64], help="sequences at once (1,8,64)")
            q.add_argument("--recompute", type=several(one_of(("toy", "gpt2", "none"))), default=["toy", "gpt2"], help="sizes of "
                           "the second table, or none (toy,gpt2)")  # fmt: skip

    def measure(function, tokens=True):
        """A verb that looks at checkpoints."""
        q = verb(function)
        q.add_argument("--ckpt", type=Path, nargs="+", required=True, help="checkpoints, or runs' folders, side by side")
        q.add_argument("--device", help="cuda, cuda:1, cpu, … (cuda where there is one)")
        if tokens:
            q.add_argument("--data", type=Path, help="folder of shards or text file (what the checkpoint was trained on)")
            q.add_argument("--tokens", type=count, help="val tokens, about (more on cuda than on a CPU)")
        return q

    def stories(q, limit, help):
        q.add_argument("--source", default="Rowan/hellaswag", help="dataset on the hub, or a folder (%(default)s)")
        q.add_argument("--limit", type=whole if limit is None else count, default=limit, help=help)

    q = verb(recall)
    q.add_argument("--seeds", type=count, default=3, help="models of every arm (3)")
    q.add_argument("--steps", type=count, default=RECALL_STEPS, help="training steps of each (%(default)s)")
    q.add_argument("--procs", type=count, default=os.cpu_count(), help="models trained at once (%(default)s, the cores)")
    q.add_argument("--device", help="cuda, cuda:1, cpu, … (cpu: the models are tiny)", default="cpu")
    q = measure(slices)
    q.add_argument("--count", type=count, default=50_000_000, help="training tokens whose n-grams are counted (5e7)")
    q = measure(position)
    q.add_argument("--length", type=count, help="tokens to go up to (four blocks)")
    measure(outliers)
    measure(residual)
    q = measure(quant)
    q.add_argument("--per", choices=("layer", "head"), default="layer", help="what shares one absmax (layer)")
    stories(q, None, "rows of HellaSwag for gpt2 checkpoints, 0 for none (1,000 on cuda, 100 on a CPU)")
    stories(measure(hellaswag, tokens=False), 10_042, "rows, from the first (all 10,042)")
    q = measure(maps, tokens=False)
    q.add_argument("--text", default="The cat sat on the mat.", help="what the maps are of (%(default)s)")
    q.add_argument("--layer", type=count, help="the layer in the figure, from 1 (the last)")

    args, others = p.parse_known_args(argv)
    if args.function is ablations:
        return ablations(args.parser, args, others)
    if others:
        args.parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=args.out):  # it can be written to: not found out after hours of measuring
            pass
        args.function(args.parser, args)
    except FileExistsError:
        args.parser.fail(f"--out={args.out} is a file: name a folder")
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        args.parser.fail("out of memory: ask for less, a smaller --tokens, --length, --T, --n_embd or --num_samples")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench.py: stopped"))  # and its processes with it
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nbench.py: interrupted")
    except OSError as e:  # the reader, `| head` say, has had enough; or a full disk
        if isinstance(e, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1 if isinstance(e, BrokenPipeError) else f"bench.py: stopped: {e}")
