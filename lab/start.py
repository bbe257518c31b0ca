"""
When does the difference pay? The embedding's start, the rate, and the sign in diff_v2.

    python -m lab.start run                    # all runs, below out/start
    python -m lab.start run --pieces="start"   # some of them: see --help
    python -m lab.start_page tables            # what they say, as on start.md

It is made for a GPU: an H200 makes the runs in some twenty minutes. On a core 500 steps take three
minutes, and there are more than two thousand runs.

lab/results/start.md has the question and the answers, start-record.md the predictions. Runs are
those of train.py's toy. They are trained many at once (lab/many.py), each with its own seed, rate
and embedding. Each cell has a rate of its own, chosen on other seeds than those that are reported.
"""
import json
import math
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import train
from data import byte_tokens, load_manual
from lab import arms, stats
from lab.many import Together
from model import GPT, make_rope

arms.register()
ROWS = {
    "softmax": dict(attn="softmax"),
    "softmax with a norm": dict(attn="softmax", subln=1.0),
    "softmax with half the heads": dict(attn="softmax", n_head=2),
    "diff without its second map": dict(attn="softmax_factor", n_head=2),
    "softmax minus the average": dict(attn="softmax_average"),
    "softmax with a norm, minus the average": dict(attn="softmax_average", subln=1.0),
    "diff": dict(attn="diff"),
    "diff without its norm": dict(attn="diff", subln=0.0),
    "diff with λ_init 0.8": dict(attn="diff_constant"),
    "diff with λ_init 0.8, without its second map": dict(attn="softmax_factor_small", n_head=2),
    "softmax with a norm and the factor 0.2": dict(attn="softmax_factor_small"),
    "diff_v2": dict(attn="diff_v2"),
    "gate": dict(attn="gate"),
    "softmax with diff_v2's MLP": dict(attn="softmax", mlp_width=292),
    "diff_v2 with a plus": dict(attn="diff_v2_free_plus"),
    "diff_v2 with a smaller plus": dict(attn="diff_v2_smaller_plus"),
    "two gated maps": dict(attn="two_gates"),
}
SHOWN = ("softmax", "softmax with a norm", "diff")  # at each rate, and at more starts and sizes
BETWEEN = (*SHOWN, "diff without its second map")  # at a std of 0.2, too
LONGER = (  # at more steps
    *BETWEEN, "diff with λ_init 0.8, without its second map", "diff with λ_init 0.8", "diff_v2",
)
SIGNS = ("diff_v2 with a plus", "diff_v2 with a smaller plus", "two gated maps")
V2 = ("softmax", "gate", "diff_v2", *SIGNS)
ARMS = [row for row in ROWS if row not in SIGNS]
USUAL_STD = 0.05  # of the embedding, as a GPT draws it: 0.051 with 128 channels, 0.042 with 192
RATES = tuple(5e-4 * 2**i for i in range(6))  # 5e-4 to 1.6e-2
CHOOSE_ON = (1, 2)  # seeds on which rates are chosen
CHOOSE_V2_ON = tuple(range(48, 56))  # as for the gate of lab/text.py
FEW = tuple(range(3, 8))
SOME = tuple(range(3, 15))
MANY = tuple(range(3, 23))
OUT = Path("out/start")


# ---- the models and what they read

class Untied(GPT):
    """A GPT whose output layer has weights of its own. std: the embedding's, at the start."""

    def __init__(self, config, std, seed):
        super().__init__(config, seed)
        rows, C = self.wte.weight.shape
        self.head_proj = nn.Linear(C, rows, bias=False)
        self.draw_parameters(seed)  # once more, with the output layer, as the embedding was drawn
        if std != USUAL_STD:
            self.wte.weight.data *= std * math.sqrt(3 * C)

    def forward(self, idx, targets):
        x = self.wte(idx)
        rope = make_rope(self.config, x.shape[1], x.device, x.dtype)
        for block in self.blocks:
            x = block(x, rope, {})
        logits = self.head_proj(self.norm(x))[..., : self.config.vocab_size]
        return logits.detach(), F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Cell:
    """What all runs of one group share. The start of the embedding may differ among them."""

    row: str
    head: str  # "own": the output layer has weights of its own. "tied": those of the embedding
    text: str = "manual"
    steps: int = 500
    size: str = "0.8 M"

    def config(self, kernel="sdpa"):
        larger = dict(n_layer=6, n_head=6, n_embd=192) if self.size == "2.7 M" else {}
        tokens = 65_536 if self.text == "manual" else 262_144
        return replace(train.PRESETS["toy"], vocab_size=257, kernel=kernel, dtype="float32",
                       eval_tokens=tokens, steps=self.steps, warmup=self.steps // 10,
                       **larger | ROWS[self.row])

    def model(self, std, seed, kernel="sdpa"):
        config = self.config(kernel)
        if self.head == "own":
            return Untied(config, std, seed)
        if std != USUAL_STD:
            raise ValueError("a tied embedding starts as it is drawn")
        return GPT(config, seed)


@lru_cache
def together(row, head, size, device):
    """What trains such models. It is compiled once, for all texts and lengths."""
    return Together(Cell(row, head, size=size).model(USUAL_STD, seed=1, kernel="map"), device)


@lru_cache
def load_text(name):
    """(train, val) as bytes: Python's manual, or the .py files of its standard library."""
    if name == "manual":
        return load_manual()
    file = OUT / "stdlib.npz"
    if not file.exists():
        folder = Path(sysconfig.get_path("stdlib"))
        paths = [p for p in folder.rglob("*.py") if "site-packages" not in p.parts]
        texts = [path.read_bytes() for path in sorted(paths)]
        np.savez_compressed(file, train=byte_tokens([t for i, t in enumerate(texts) if i % 20]),
                            val=byte_tokens(texts[::20]))
    with np.load(file) as arrays:
        return arrays["train"], arrays["val"]


# ---- the runs

def machine(device):
    """Its name, like "H200" or "CPU": two machines round differently."""
    if not device.startswith("cuda"):
        return "CPU"
    return torch.cuda.get_device_name().removeprefix("NVIDIA ")


@lru_cache
def commit():
    """That of this code, or "" where git does not know it."""
    command = ["git", "-C", Path(__file__).parent, "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def train_one(cell, std, rate, seed, look=None):
    """The val loss of one run, by the functions of train.py: on a CPU that is faster.

    look(step, model) is called before each step, and after the last one.
    """
    config = replace(cell.config(), lr=rate, seed=seed, device="cpu")
    data, val = load_text(cell.text)
    model = cell.model(std, seed)
    optimizer = train.make_optimizer(model, config)
    for step in range(config.steps):
        if look is not None:
            look(step, model)
        train.training_step(model, optimizer, data, config, step)
    if look is not None:
        look(config.steps, model)
    return train.evaluate(model, val, config)


class Runs:
    """The runs of one cell, kept in a file of lines. A kill loses the group that is trained."""

    def __init__(self, cell, device, at_once):
        self.cell, self.device, self.at_once = cell, device, at_once
        name = "-".join(map(str, vars(cell).values()))
        self.file = OUT / f"{name}.jsonl".replace(" ", "_").replace(",", "").replace("'", "")
        self.losses = {}  # {(std, rate, seed): val loss}
        if self.file.exists():
            for line in self.file.read_text(encoding="utf-8").splitlines():
                run = json.loads(line)
                if run["at"] == machine(device):
                    self.losses[run["std"], run["lr"], run["seed"]] = run["val_loss"]

    def make(self, wanted):
        """Trains those of the wanted (std, rate, seed) that are missing, in groups."""
        missing = [run for run in dict.fromkeys(wanted) if run not in self.losses]
        while missing:
            group, missing = missing[: self.at_once], missing[self.at_once :]
            if self.device == "cpu" and self.at_once == 1:
                found = [train_one(self.cell, *group[0])]
            else:
                found = self.train_group(group)
            with open(self.file, "a", encoding="utf-8") as f:
                for (std, rate, seed), loss in zip(group, found):
                    loss = loss if math.isfinite(loss) else math.inf
                    self.losses[std, rate, seed] = loss
                    run = vars(self.cell) | dict(std=std, lr=rate, seed=seed, val_loss=loss)
                    run |= dict(at=machine(self.device), commit=commit())
                    f.write(json.dumps(run) + "\n")
            print(f"{self.file.stem}: {len(self.losses)} runs", flush=True)

    def train_group(self, group):
        padded = group + group[-1:] * (self.at_once - len(group))  # one shape is compiled once
        stds, rates, seeds = zip(*padded)
        models = [self.cell.model(std, seed, "map") for std, seed in zip(stds, seeds)]
        trainer = together(self.cell.row, self.cell.head, self.cell.size, self.device)
        text = load_text(self.cell.text)
        return trainer.train(models, rates, seeds, self.cell.config("map"), *text)[0]

    def best_rate(self, std, rates=RATES, seeds=CHOOSE_ON):
        """The rate with the least mean loss. The grid grows until it lies inside."""
        rates = sorted(rates)
        while True:
            self.make([(std, rate, seed) for rate in rates for seed in seeds])
            mean = {rate: fmean(self.losses[std, rate, seed] for seed in seeds) for rate in rates}
            best = min(mean, key=mean.get)
            if best == rates[0]:
                rates = [best / 2, *rates]
            elif best == rates[-1]:
                rates = [*rates, best * 2]
            else:
                return best


def piece_start(row, head, device, at_once):
    """The toy: rates, and then the seeds that are reported."""
    runs = Runs(Cell(row, head), device, at_once)
    stds = [USUAL_STD] if head == "tied" else [1.0, USUAL_STD]
    runs.make([(std, rate, seed) for std in stds for rate in RATES for seed in CHOOSE_ON])
    seeds = FEW if head == "tied" else MANY
    runs.make([(std, runs.best_rate(std), seed) for std in stds for seed in seeds])
    if head == "own" and row in SHOWN:
        runs.make([(std, rate, seed) for std in stds for rate in RATES for seed in FEW])
    if head == "own" and row in BETWEEN:
        runs.make([(0.2, rate, seed) for rate in RATES for seed in CHOOSE_ON])
        runs.make([(0.2, runs.best_rate(0.2), seed) for seed in MANY])


def piece_length(row, device, at_once):
    """2,000 steps over new text."""
    runs = Runs(Cell(row, "own", "stdlib", 2000), device, at_once)
    stds = (1.0, USUAL_STD)
    runs.make([(std, rate, seed) for std in stds for rate in RATES for seed in CHOOSE_ON])
    runs.make([(std, runs.best_rate(std), seed) for std in stds for seed in SOME])


def piece_size(row, device, at_once):
    """2.7 M parameters."""
    runs = Runs(Cell(row, "own", size="2.7 M"), device, max(1, at_once // 2))
    for std in (1.0, USUAL_STD):
        best = runs.best_rate(std)
        runs.make([(std, best, seed) for seed in SOME])


def piece_v2(row, device, at_once):
    """The sign inside of diff_v2, as the gate of lab/text.py was measured."""
    runs = Runs(Cell(row, "tied"), device, at_once)
    best = runs.best_rate(USUAL_STD, (1e-3, 2e-3, 4e-3), seeds=CHOOSE_V2_ON)
    runs.make([(USUAL_STD, best, seed) for seed in range(8, 48)])


def piece_lead(row, steps, device, at_once):
    """What diff_v2's lead is worth, in steps."""
    if steps < 8000:
        runs = Runs(Cell(row, "tied", "stdlib", steps), device, min(at_once, 12))
        best = runs.best_rate(USUAL_STD, RATES[1:5])
        runs.make([(USUAL_STD, best, seed) for seed in SOME])
    else:  # all at once: a later group would take as long. The rate is chosen on seed 1
        runs = Runs(Cell(row, "tied", "stdlib", steps), device, min(at_once, 16))
        runs.make([(USUAL_STD, rate, seed) for rate in RATES[1:5] for seed in (1, 3, 4, 5)])


def pieces():
    """{name: a function of device and at_once}, the most important first."""
    found = {}
    for row in dict.fromkeys([*SHOWN, *ARMS]):
        found[f"start: {row}"] = partial(piece_start, row, "own")
    for row in V2:
        found[f"v2: {row}"] = partial(piece_v2, row)
    for row in LONGER:
        found[f"length: {row}"] = partial(piece_length, row)
    for row in ("softmax", "diff_v2"):
        for steps in (500, 2000, 8000):
            found[f"lead: {row}, {steps} steps"] = partial(piece_lead, row, steps)
    for row in SHOWN:
        found[f"size: {row}"] = partial(piece_size, row)
    for row in ARMS:
        if row not in V2:  # of which v2 has more seeds
            found[f"tied: {row}"] = partial(piece_start, row, "tied")
    return found


def main(argv=None):
    p = stats.parser("lab.start", __doc__)
    p.add_argument("verb", choices=["run"])
    p.add_argument("--pieces", help="pieces to train, of start, v2, length, lead, size and tied, "
                   "or one row of a piece, like 'start; v2: diff_v2' (all)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                   help="on a CPU models are trained one by one")
    p.add_argument("--at_once", type=int, default=24, help="models that are trained together")
    args = p.parse_args(argv)
    known = pieces()
    groups = {name.partition(":")[0] for name in known}
    wanted = [name.strip() for name in args.pieces.split(";")] if args.pieces else groups
    for name in wanted:
        if name not in known and name not in groups:
            p.error(f"there is no piece {name!r}")
    OUT.mkdir(parents=True, exist_ok=True)
    at_once = 1 if args.device == "cpu" else args.at_once
    for name, run in known.items():
        if name in wanted or name.partition(":")[0] in wanted:
            run(args.device, at_once)


if __name__ == "__main__":
    sys.exit(main())
