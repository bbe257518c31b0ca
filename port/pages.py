"""
Write port/mistakes.md from the list of mistakes, and port/ports.md's tables from port/ports.json.

    python -m port.pages
"""
import argparse
import sys
import textwrap
from pathlib import Path

from port import survey
from port.mistakes import BEYOND_THE_LAYER, BY_CODE, BY_NUMBER, FROM_OUTSIDE, NOTES

HERE = Path(__file__).parent
HEAD = """# What goes wrong in ports of differential attention

`python -m port myport.py` looks for all of these. *It leaks* means: tokens see the future.
A mistake that leaks is listed as DIFFERS; the leak itself is `sees the future`, BROKEN, and a
verdict is the worst of its findings. This page is written from [mistakes.py](mistakes.py), which
also says what BROKEN, DIFFERS, CHOICE, SAME and NOTE are.

The code is that of [paper.py](paper.py) and [wrong.py](wrong.py). There are B texts of T tokens and
h heads, each with two maps:

- x is the input, (B, T, C), and y what a step makes of it. In split and values y is (B, T, channels
  of all heads); elsewhere it is (B, h, T, channels of a head), and in subtract it holds both maps,
  (B, h, maps, T, channels), until they are subtracted.
- m is queries, keys or values, (B, heads, maps, T, c), as q, k and v are. Values have one map.
- scores and A, their softmax, are (B, h, maps, T, T).
- n is how many heads y is split into, and times is how many heads share a key or a value.
- w holds the weights, the sizes and the numbers of the layer. step holds all its steps, so that
  step.rms is the paper's rms, or what stands in its place.
"""


def mistakes_page():
    parts = [HEAD, "## Seen from outside", bullets(FROM_OUTSIDE), "## Measured", bullets(BY_NUMBER)]
    parts.append("## Found by trying\n\nThe paper's step, and what ports have in its place.")
    steps = dict.fromkeys((m.step, m.paper_code) for m in BY_CODE)  # in order, each once
    for step, paper_code in steps:
        mistakes = [m for m in BY_CODE if (m.step, m.paper_code) == (step, paper_code)]
        is_of_version_2 = all(m.only == "version 2" for m in mistakes)
        heading = f"{step}, in version 2" if is_of_version_2 else step
        parts.append(f"### {heading}\n\n{block(paper_code)}")
        for m in mistakes:
            parts += [wrap(f"{m.verdict} **{m.name}**: {m.sentence}", ""), block(m.port_code)]
    parts += ["## Said beside the verdict", bullets(NOTES), "## Beyond the layer"]
    beyond = [wrap(f"- **{name}**: {text}") for name, text in BEYOND_THE_LAYER.items()]
    parts.append("\n".join(beyond))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def bullets(mistakes):
    return "\n".join(wrap(f"- {m.verdict} **{m.name}**: {m.sentence}") for m in mistakes)


def wrap(text, indent="  "):
    return textwrap.fill(text, 100, subsequent_indent=indent, break_on_hyphens=False,
                         break_long_words=False)


def block(code):
    return f"```python\n{code}\n```"


def main(argv):
    """Write both pages."""
    parser = argparse.ArgumentParser(prog="python -m port.pages", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)  # it takes no arguments, and knows --help
    (HERE / "mistakes.md").write_text(mistakes_page(), encoding="utf-8")
    ports = HERE / "ports.md"
    ports.write_text(survey.fill(ports.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
