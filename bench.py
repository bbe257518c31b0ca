"""
Every measurement. Each verb prints a Markdown table and writes <out>/<verb>.md, .json and .png.

    python bench.py loss            # the table and the curves of the runs under out/
    python bench.py speed           # attention alone and the training step, Table 7 of the paper
    python bench.py decode          # a token of the sampler, against the length of its context
    python bench.py <verb> --help
"""
import argparse
import datetime
import gc
import importlib.util
import inspect
import json
import math
import shlex
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

import train
from model import ATTENTION, GPT, KERNELS, GPTConfig, next_token, pick_kernel
from prepare_fineweb import Parser, count, device_name, one_of, pick_device, several, whole

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

    about: the conditions, a dict. tables: caption to rows (see `markdown`). raw: what else the JSON should hold.
    draw(figure) draws on an empty matplotlib figure, and may resize it."""
    text = "\n\n".join(f"{caption}\n\n{markdown(rows)}" for caption, rows in tables.items())
    text += "\n\n" + "; ".join(f"{key}: {value}" for key, value in about.items()) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    (out / f"{name}.json").write_text(json.dumps(dict(about=about, tables=tables, **raw), indent=1) + "\n")
    written = f"{out / name}.md, .json"
    if draw is not None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            written += " (for the figure: pip install matplotlib)"
        else:
            figure = Figure(figsize=(8, 4), layout="constrained")
            draw(figure)
            figure.savefig(out / f"{name}.png", dpi=150)
            written += ", .png"
    print(f"\n{text}\n-> {written}")


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
        head, records, _ = train.read_log(folder / "log.jsonl")
        if head is None or not records:
            open_ends.append((folder, "never began"))
            continue
        group = groups.setdefault(tuple((k, head.get(k)) for k in train.IDENTITY if k != "seed"), {})
        if head["seed"] in group:
            open_ends.append((folder, "left out: the same run as another folder's"))
            continue
        group[head["seed"]] = (head, records)
        if not finished(head, records):
            what = records[-1].get("not_finite")
            why = f"not finite ({what})" if what else f"interrupted, at step {records[-1]['step']:,} of {head['steps']:,}"
            open_ends.append((folder, why))
    return groups, open_ends


def finished(head, records):
    return records[-1]["step"] == head["steps"] and "val_loss" in records[-1]


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


def compare(folders, out):
    """The table, the curves and the samples of the runs in folders."""
    groups, open_ends = results(folders)
    if not groups:
        sys.exit("bench.py: no runs there: `python train.py --attn=softmax,diff --seed=1,2` makes some")
    arms = [dict(key) for key in groups]
    differ = [k for k in train.IDENTITY if k not in ("seed", "attn") and len({str(a[k]) for a in arms}) > 1]

    def label(key, without=()):
        values = ((k, dict(key)[k]) for k in differ if k not in without)
        return " ".join([dict(key)["attn"]] + [train.tag(k, str(v)[:9] if isinstance(v, str) else v) for k, v in values if v is not None])

    def softmax(key, rate=True):
        """The softmax runs to compare with: the same but for the attention and what belongs to it."""
        own = {"attn", "n_head", "subln", "lambda_init"} | (set() if rate else {"lr"})
        like = [k for k in groups if dict(k)["attn"] == "softmax" and all(a == b for a, b in zip(k, key) if a[0] not in own)]
        return max(like, key=lambda k: (not dict(k)["subln"], dict(k)["n_head"]), default=None)

    order = sorted(groups, key=lambda k: (list(STYLE).index(dict(k)["attn"]), label(k)))
    tables = {"Final val loss, nats per token, mean ± standard deviation over seeds; differences ± standard error":
              [{"attn": label(k)} | row(groups[k], groups.get(softmax(k))) for k in order]}  # fmt: skip
    if "lr" in differ:  # one rate for all may suit one arm only
        best = {}
        for k in order:
            loss = row(groups[k], None)["val loss"]
            rest = label(k, ["lr"])
            if loss and (rest not in best or loss[0] < best[rest][0]):
                best[rest] = (loss[0], k)
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
    about["seeds"] = ", ".join(map(str, seeds))
    for group in groups.values():
        for _, records in group.values():
            records[-1].pop("val_losses", None)  # thousands of figures that the log has too
    runs = [dict(head=head, records=records) for group in groups.values() for head, records in group.values()]
    publish(out, "loss", about, tables, lambda figure: curves(figure, groups, order, label), runs=runs)


def curves(figure, groups, order, label):
    """Val loss against tokens and hours, a thin line per run and their mean; lambda by layer over training."""
    from matplotlib import colormaps

    lambdas = [k for k in order if dict(k)["attn"].startswith("diff")][:4]
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
    against_tokens.legend()
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
    """The loss curves, the table of a comparison and what the models said on the way.

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
    """The seven rows of the paper's Table 6, trained and compared.

    Every other flag is train.py's (--preset=toy, --steps, --device, …). Stop it whenever you like: the same command
    goes on. Then `bench.py residual` says what the norm does to the residual stream."""
    _, (run,) = train.parse([f"--preset={args.preset}", *flags])
    folders, rows = {}, []
    for number, seed in enumerate(args.seed):
        for name, own in TABLE6.items():
            folder = args.out / f"table6-row{list(TABLE6).index(name) + 1}-seed{seed}"
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
    if isinstance(e, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(e):
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
        except (RuntimeError, ValueError, MemoryError, ImportError) as e:
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
    args.autocast = torch.autocast(args.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    torch.set_float32_matmul_precision("high")  # as in train.py
    if args.compile:
        torch._dynamo.config.recompile_limit = 1000  # one process compiles many sizes of the same few functions
    return size, preset


def built(args, attn, kernel, **config):
    """A model on the device with that kernel behind it. ValueError if it can't run."""
    model = GPT(GPTConfig(attn=attn, **config)).to(args.device)
    pick_kernel(model, kernel, getattr(torch, args.dtype))
    return model


def attention_alone(args, size, attn, kernel, B, T):
    """Builds forward and backward of A V from q, k and v as projected: the rotation and the subtraction count, the
    projections and the norm behind don't."""
    layer = built(args, attn, kernel, block_size=T, **size | dict(n_layer=1, vocab_size=64)).blocks[0].attn
    shapes = [(layer.n_head, layer.d)] * 2 + [(layer.h, size["n_embd"] // layer.h)]
    q, k, v = (torch.randn(B, T, *shape, device=args.device, dtype=getattr(torch, args.dtype)).transpose(1, 2)
               .requires_grad_() for shape in shapes)  # fmt: skip
    rope = layer.rope(q)
    fast = layer.fast if args.flash else lambda q, k, v, rope, state: layer.weights(q, k).to(v.dtype) @ v
    fast = torch.compile(fast, dynamic=False, fullgraph=True) if args.compile else fast

    def forward(mode=torch.no_grad):
        with mode(), args.autocast:
            return fast(q, k, v, rope, None)

    inputs, gradient = [q, k, v, *layer.parameters()], torch.ones_like(forward())
    both = lambda: torch.autograd.grad(forward(torch.enable_grad), inputs, gradient, allow_unused=True)
    return {"fwd+bwd": both, "fwd": forward}


def nanogpt(path, size, T):
    """The model of karpathy/nanoGPT's model.py at path, of our softmax model's size, embedding rows included."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
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


def crossing(Ts, a, b):
    """The T at which b's time per token falls below a's, between two measured ones along straight lines in log-log, or
    None."""
    gap = np.log(a) - np.log(b)
    for i in range(len(Ts) - 1):
        if gap[i] <= 0 < gap[i + 1]:
            return float(np.exp(np.interp(0, gap[i : i + 2], np.log(Ts[i : i + 2]))))


def speed(p, args):
    """Tokens per second of attention alone and of the training step, laid out like Table 7 of the paper.

    Forward, and forward with backward: of A V from projected q, k and v at every --T, and of the whole training step,
    the optimizer included, at --train_T. Median of --repeats interleaved rounds ± half the distance between the
    quartiles, in brackets the relative difference to softmax of the same rounds. A call takes --batch_size sequences of
    --train_T, or as many tokens at another length."""
    size, preset = machine(p, args)
    if args.nanogpt and not args.nanogpt.is_file():
        p.fail(f"--nanogpt={args.nanogpt} is no file: clone github.com/karpathy/nanoGPT and name its model.py")
    cuda, T = args.device.type == "cuda", args.train_T or preset["block_size"]
    B = args.batch_size or preset["batch_size"]
    Ts = sorted(set(args.T or ([1024, 2048, 4096, 8192, 16384] if cuda else [256, 512, 1024, 2048, 4096, 8192])))
    about = conditions(args.device, dtype=args.dtype, compiled=args.compile, repeats=args.repeats,
                       model=f"{size['n_layer']} layers, {size['n_head']} heads, {size['n_embd']} channels",
                       batch=f"{B} x {T} tokens a training step, as many for attention alone, one sequence at least")  # fmt: skip
    names, problems, ran = [], [], args.kernel == ["auto"]  # (arm, kernel); the linear arms have no kernel to choose
    for attn in args.arms:
        for kernel in args.kernel if attn in ("softmax", "diff") and args.flash else ["chunks" if args.flash else "map"]:
            try:
                one = GPT(GPTConfig(attn=attn, **size | dict(n_layer=1, vocab_size=64))).to(args.device)
                took, why = pick_kernel(one, kernel, getattr(torch, args.dtype))
                if took:
                    print(f"{attn}: kernel {took}{why and f' ({why})'}")
                    kernel, ran = took, True
            except ValueError as e:  # a row of the table, if another one can run
                problems.append(str(e))
            names += [(attn, kernel)] * ((attn, kernel) not in names)
    if problems and not ran:
        p.fail(problems[0])
    if args.profile:
        return profile(args, size, names, B, T)
    peak_flops = next((flops for name, flops in train.PEAK.items() if cuda and name in about["device"]), None)
    flops, tables, timings, lines = GPT(GPTConfig(**size)).flops_per_token(T), {}, [], {}
    for caption, kind, lengths in (("attention alone", attention_alone, Ts), ("training step", training_step, [T])):
        rows = tables.setdefault(caption, [])
        for length in lengths:
            b = max(1, B * T // length)
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
                    if kind is attention_alone and what == "fwd+bwd":
                        lines.setdefault((attn, kernel), {})[length] = 1e6 / rate
                if cuda:
                    row["peak GB"] = one["peak"] / 1e9
                if kind is training_step and peak_flops:
                    row["MFU"] = flops * b * length / statistics.median(one["fwd+bwd"]) / peak_flops
    first = {attn: next((line for (a, _), line in lines.items() if a == attn), {}) for attn in ("softmax", "linear")}
    shared = [t for t in Ts if t in first["softmax"] and t in first["linear"]]
    cross = crossing(shared, *([first[attn][t] for t in shared] for attn in ("softmax", "linear")))

    def draw(figure):
        axes = figure.subplots()
        for i, ((attn, kernel), line) in enumerate(lines.items()):
            axes.plot(line.keys(), line.values(), marker="osv^D"[i % 5], label=f"{attn} ({kernel})", **STYLE[attn])
        if cross:
            axes.axvline(cross, color="grey", linewidth=0.8)
            axes.annotate(f" T = {cross:,.0f}", (cross, 0.02), xycoords=("data", "axes fraction"))
        axes.set(xscale="log", yscale="log", xlabel="T", ylabel="µs per token, attention forward + backward")
        axes.set_xticks(Ts, Ts)
        axes.legend()

    about["softmax and linear cross at"] = f"T = {cross:,.0f}" if cross else "no T between those measured"
    publish(args.out, "speed", about, tables, draw, timings=timings, crossing=cross)


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


def compiled_step(args, model):
    """What generate's step is with --compile, else None: what sample.py does."""
    return torch.compile(model, mode="reduce-overhead", fullgraph=True) if args.compile else None


def decoding(args, model, B, T, sizes):
    """Builds a greedy step of the sampler for B sequences whose state holds T tokens: zeros, which take as long as any.
    Adds the bytes of the state, the counters apart, to sizes."""
    start, state = max(1, T - 64), [{} for _ in model.blocks]
    for block in model.blocks:
        block.attn.block_size = T
    x, t = torch.zeros(B, 1, dtype=torch.int64, device=args.device), start
    with torch.inference_mode(), args.autocast:
        model(x, state=state)
    sizes.append(sum(s.nbytes for layer in state for name, s in layer.items() if name != "T"))
    step_of = compiled_step(args, model)
    run = model if step_of is None else step_of
    if args.compile:
        for s in (s for layer in state for s in layer.values()):
            torch._dynamo.mark_static_address(s)

    def step():
        nonlocal x, t
        with torch.inference_mode(), args.autocast:
            if t in (start, T):
                for layer in state:
                    layer["T"].fill_(start)
                t = start
            x, t = next_token(run(x, state=state)[0][:, -1], 0, None, None, None), t + 1

    return {"step": step}


def recomputing(args, preset):
    """A row: the sampler, and generation that runs its whole context through the model for every token, as nanoGPT's does.
    Softmax, one sequence, greedy: 500 tokens of a toy model, prefill included, or eight after the first 1,000 of GPT-2
    small. The recomputation is timed in between, at evenly spaced lengths, so that a slow minute slows both."""
    toy = preset == "toy"
    block_size, vocab_size, first, last, gap = (512, 257, 1, 500, 10) if toy else (1024, 50257, 1000, 1007, 3)
    size = {name: train.PRESETS[preset][name] for name in ("n_layer", "n_head", "n_embd")}
    model = built(args, "softmax", "auto", block_size=block_size, vocab_size=vocab_size, **size)
    step, idx = compiled_step(args, model), torch.zeros(1, block_size, dtype=torch.int64, device=args.device)
    fast, slow = [], []
    with torch.inference_mode(), args.autocast:
        list(model.generate(idx[:, :first], 4, temperature=0, step=step))  # warms up, and compiles
        made = model.generate(idx[:, :first], last - first + 2, temperature=0, step=step)
        if not toy:
            next(made)  # the prefill
        for t in range(first, last + 1):
            fast.append(clock(lambda: next(made), args.device))
            if (t - first) % gap == 0:
                again = lambda: next_token(model(idx[:, :t])[0][:, -1], 0, None, None, None)  # noqa: B023
                slow.append(clock(again, args.device))
    timed = f"at {len(slow)} of {len(fast)} lengths"
    fast, slow = statistics.mean(fast), statistics.mean(slow)
    return {"model": preset, "context": f"{first} to {last}", "sampler tokens/s": 1 / fast,
            "recomputing tokens/s": 1 / slow, "ratio": slow / fast, "recomputation timed": timed}  # fmt: skip


def decode(p, args):
    """Tokens per second and bytes of state of the sampler against the length of its context, --T.

    A step is greedy and takes --num_samples sequences at once, over the last 64 tokens before T. With --compile the
    softmax arms attend to all of their cache whatever is in it. A second table sets the sampler beside generation that
    recomputes its context for every token."""
    size, _ = machine(p, args)
    cuda = args.device.type == "cuda"
    Ts = sorted(set(args.T or ([1024, 4096, 16384] if cuda else [64, 256, 1024, 4096])))
    about = conditions(args.device, dtype=args.dtype, compiled=args.compile, repeats=args.repeats,
                       model=f"{size['n_layer']} layers, {size['n_head']} heads, {size['n_embd']} channels")  # fmt: skip
    models, rows, lines = {}, [], {}
    for attn in args.arms:
        models[attn] = GPT(GPTConfig(attn=attn, **size)).to(args.device)
        if args.dtype == "bfloat16":
            models[attn].weights_in_bf16()
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
                lines.setdefault((attn, B), {})[T] = (rate, states[attn][0] // B)
    tables = {"decode": rows}
    if again := [recomputing(args, preset) for preset in args.recompute if preset != "none"]:
        tables["against recomputing the context for every token"] = again

    def draw(figure):
        left, right = figure.subplots(1, 2)
        for (attn, B), line in lines.items():
            rates, sizes = zip(*line.values())
            many = args.num_samples.index(B)
            left.plot(line.keys(), rates, marker="osv^D"[many % 5], label=None if many else attn, **STYLE[attn])
            left.annotate(f" {B}", (max(line), rates[-1]), fontsize="small")
            if not many:
                right.plot(line.keys(), sizes, marker="o", label=attn, **STYLE[attn])
        left.set(xscale="log", yscale="log", xlabel="context", ylabel="tokens per second (at the right end: sequences)")
        right.set(xscale="log", yscale="log", xlabel="context", ylabel="bytes of state a sequence")
        left.legend()

    measured = [dict(arm=attn, sequences=B, context=T, tokens_per_s=rate, state_bytes=n)
                for (attn, B), line in lines.items() for T, (rate, n) in line.items()]  # fmt: skip
    publish(args.out, "decode", about, tables, draw, measured=measured)


def main(argv=None):
    p = Parser(prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = p.add_subparsers(dest="verb", required=True, metavar="verb")

    def verb(function):
        """The parser of one verb, whose help is the function's docstring."""
        doc = inspect.cleandoc(function.__doc__)
        q = verbs.add_parser(function.__name__, help=doc.splitlines()[0], description=doc,
                             formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        q.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of what is written (out/bench)")
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
            q.add_argument("--batch_size", type=count, help="sequences of a training step (the preset's)")
            q.add_argument("--train_T", type=count, help="their length (the preset's block_size)")
            q.add_argument("--nanogpt", type=Path, help="karpathy/nanoGPT's model.py, to time its training step beside ours")
            q.add_argument("--profile", action="store_true", help="only torch.profiler's table of one step of each arm")
        else:
            q.add_argument("--num_samples", type=several(count), default=[1, 8, 64], help="sequences at once (1,8,64)")
            q.add_argument("--recompute", type=several(one_of(("toy", "gpt2", "none"))), default=["toy", "gpt2"], help="sizes of "
                           "the second table, or none (toy,gpt2)")  # fmt: skip

    args, others = p.parse_known_args(argv)
    if args.function is ablations:
        return ablations(args.parser, args, others)
    if others:
        args.parser.error(f"unrecognized arguments: {' '.join(others)}")
    args.function(args.parser, args)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nbench.py: interrupted")
    except OSError as e:
        sys.exit(f"bench.py: stopped: {e}")
