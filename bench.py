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
import sys
from pathlib import Path

import torch

from prepare_fineweb import Parser, device_name

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
    return dict(device=device_name(device), torch=torch.__version__, **more, date=str(datetime.date.today()), command=command)


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
    print("\n" + text)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    (out / f"{name}.json").write_text(json.dumps(dict(about=about, tables=tables, **raw), indent=1) + "\n")
    written = f"{out / name}.md, .json"
    if draw is not None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            sys.exit(f"bench.py: wrote {written}; for the figure: pip install matplotlib")
        figure = Figure(figsize=(8, 4), layout="constrained")
        draw(figure)
        figure.savefig(out / f"{name}.png", dpi=150)
        written += ", .png"
    print(f"-> {written}")


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

    args = p.parse_args(argv)
    args.function(args.parser, args)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nbench.py: interrupted")
    except OSError as e:
        sys.exit(f"bench.py: stopped: {e}")
