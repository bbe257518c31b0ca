"""
Every measurement. Each verb prints a Markdown table and writes <out>/<verb>.md, .json and .png.

    python bench.py loss            # the table and the curves of the runs under out/
    python bench.py <verb> --help
"""
import argparse
import datetime
import json
import math
import shlex
import statistics
import sys
from pathlib import Path

import torch

import train
from prepare_fineweb import Parser, device_name, several, whole

def colormap(x):
    """A colour for x from 0 to 1, told apart in grey too."""
    from matplotlib import colormaps

    return colormaps["viridis"](0.9 * x)


# Okabe and Ito's colours, told apart by every kind of eye; dashed: a difference of two maps
STYLE = {
    "softmax": dict(color="#0072B2", linestyle="-"),
    "diff": dict(color="#D55E00", linestyle="--"),
    "linear": dict(color="#009E73", linestyle="-"),
    "diff_linear": dict(color="#CC79A7", linestyle="--"),
}


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
                colour = colormap(layer / max(1, len(records[0]["lambda"]) - 1))
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


def main(argv=None):
    p = Parser(prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = p.add_subparsers(dest="verb", required=True, metavar="verb")

    def verb(function):
        """The parser of one verb, whose help is the function's docstring."""
        doc = function.__doc__
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
