"""
The toys: small models of a text, many of them, and which of them are trained.

    python -m lab.toys --only="start"   # some of the runs, below out/toys. --help names all pieces
    python -m lab.toys                  # all. Those of findings.md took twenty minutes of an H200.
                                        # Pieces named "controls" or "library" have not been run
    python -m lab.tables out/toys       # what they say

A toy is train.py's preset of that name, or somewhat larger. On a core 500 steps take three minutes,
and there are more than two thousand runs. It can be stopped, and goes on. A smaller GPU may need
--at_once=8.

A Cell is what all runs of one group share: the arm, the text, the steps. Its runs differ in the
rate, the seed, and how large the embedding starts. Each cell has a rate of its own, chosen on other
seeds than those that are reported: a loss that was chosen for being small is not a fair one.
"""
import math
import subprocess
import sysconfig
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import lab.arms  # noqa: F401, it adds its classes to model.ATTENTION
import train
from cli import check_settings
from data import byte_tokens, hash_of, load_manual
from lab.many import Together
from lab.stats import add_run, one_line, parser, read_runs
from model import GPT, Refused, make_rope

OUT = Path("out/toys")
ROWS = {  # what an arm is called in tables, and its settings
    "softmax": dict(attn="softmax"),
    "softmax with a norm": dict(attn="softmax_norm"),
    "softmax with a norm and the factor 0.2": dict(attn="softmax_factor_small"),
    "softmax with half the heads": dict(attn="softmax", n_head=2),
    "softmax with half the heads and a norm": dict(attn="softmax_norm", n_head=2),
    "softmax minus the average": dict(attn="softmax_average"),
    "gate": dict(attn="gate"),
    "diff": dict(attn="diff"),
    "diff without its second map": dict(attn="softmax_factor", n_head=2),
    "diff without its norm": dict(attn="diff_no_norm"),
    "diff with its norm from 0.2": dict(attn="diff_norm_low"),
    "diff with λ_init 0.8": dict(attn="diff_constant"),
    "diff with λ_init 0.8, without its second map": dict(attn="softmax_factor_small", n_head=2),
    "diff_v2": dict(attn="diff_v2"),
    "diff_v2 with a plus": dict(attn="diff_v2_free_plus"),
    "diff_v2 with a smaller plus": dict(attn="diff_v2_smaller_plus"),
    "diff_v2 with λ of free sign": dict(attn="diff_v2_free_sign"),
    "softmax minus a gated average": dict(attn="gated_average"),
    "two gated maps": dict(attn="two_gates"),
    "linear": dict(attn="linear"),
    "linear with half the heads and a norm": dict(attn="linear_norm", n_head=2),
    "linear minus the average": dict(attn="linear_average"),
    "linear with one head of span 4": dict(attn="linear_one_short_head"),
    "diff_linear": dict(attn="diff_linear"),
    "softmax with decay": dict(attn="softmax_decay"),
    "linear with decay": dict(attn="linear_decay"),
}
SIZES = {"0.8 M": {}, "2.7 M": dict(n_layer=6, n_head=6, n_embd=192)}  # parameters
EVAL_TOKENS = {  # by text, at most
    "manual": 65_536, "library": 262_144, "addresses": 262_144,
}
# what we call a start as a GPT draws it. In fact it is 0.051 with 128 channels, and 0.042 with 192
AS_DRAWN = 0.05
RATES = tuple(5e-4 * 2**i for i in range(6))  # 5e-4 to 1.6e-2
CHOOSE_ON = (1, 2)  # seeds on which rates are chosen
FEW = tuple(range(3, 8))  # and those that are reported
TWELVE = tuple(range(3, 15))
TWENTY = tuple(range(3, 23))
FORTY = tuple(range(8, 48))
CHOOSE_V2_ON = tuple(range(48, 56))


# ---- the models and what they read

class Untied(GPT):
    """A GPT whose output layer has weights of its own. std: the embedding's, at the start."""

    def __init__(self, config, std, seed):
        super().__init__(config, seed=None)
        rows, C = self.wte.weight.shape
        self.head_proj = nn.Linear(C, rows, bias=False)
        self.draw_parameters(seed)  # the output layer as the embedding
        if std != AS_DRAWN:
            self.wte.weight.data *= std * math.sqrt(3 * C)

    def forward(self, idx, targets):
        x = self.wte(idx)
        rope = make_rope(self.config, x.shape[1], x.device, x.dtype)
        for block in self.blocks:
            x = block(x, rope)
        logits = self.head_proj(self.norm(x))[..., : self.config.vocab_size]
        return logits.detach(), F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Cell:
    """What all runs of one group share. The start of the embedding may differ among them."""

    row: str
    head: str  # "own": the output layer has weights of its own. "tied": those of the embedding
    text: str = "manual"  # or "library", "addresses"
    steps: int = 500
    size: str = "0.8 M"  # or "2.7 M" parameters

    def __post_init__(self):
        known = (self.row in ROWS and self.head in ("own", "tied") and self.text in EVAL_TOKENS
                 and self.size in SIZES)
        if not known:
            raise ValueError(f"there is no {self}")
        twice = SIZES[self.size].keys() & ROWS[self.row].keys()
        if twice:
            raise ValueError(f"{self.row!r} sets {', '.join(twice)} for 0.8 M parameters")

    def config(self):
        return replace(train.PRESETS["toy"], dtype="float32", eval_tokens=EVAL_TOKENS[self.text],
                       steps=self.steps, warmup=self.steps // 10, **SIZES[self.size],
                       **ROWS[self.row])

    def model(self, std, seed, **settings):
        config = replace(self.config(), **settings)
        if self.head == "own":
            return Untied(config, std, seed)
        if std != AS_DRAWN:
            raise ValueError("a tied embedding starts as it is drawn")
        return GPT(config, seed)


@lru_cache
def together(row, head, size, device):
    """What trains such models at once. It is compiled once, for all texts and lengths."""
    # vmap can't see into the fused kernels, so the models have the plain equation of each arm
    return Together(Cell(row, head, size=size).model(AS_DRAWN, seed=1, kernel="map"), device)


@lru_cache
def text_of(name):
    """(train, val) as bytes: Python's manual, or the .py files of its standard library.

    The tables of encodings/ are left out. Val is drawn from the whole library.
    """
    if name == "manual":
        return load_manual()
    if name != "library":
        raise ValueError(f"{name} is not trained here")
    file = OUT / "library.npz"
    if not file.exists():
        folder = Path(sysconfig.get_path("stdlib"))
        left_out = {"site-packages", "encodings"}
        paths = [path for path in folder.rglob("*.py") if not left_out & set(path.parts)]
        texts = [path.read_bytes() for path in sorted(paths)]
        train = [text for i, text in enumerate(texts) if i % 20]
        val = byte_tokens(without_lines_of(train, texts[::20]))
        np.savez_compressed(file, train=byte_tokens(train), val=spread(val, EVAL_TOKENS[name]))
    with np.load(file) as arrays:
        return arrays["train"], arrays["val"]


def without_lines_of(train, val):
    """The texts of val without the lines of 32 bytes or more that train has, too."""
    seen = set(b"\n".join(train).split(b"\n"))
    lines_of = (text.split(b"\n") for text in val)
    return [b"\n".join(line for line in lines if len(line) < 32 or line not in seen)
            for lines in lines_of]


def spread(tokens, n, piece=4096):
    """About n tokens, in pieces that are spread evenly over all of them."""
    pieces = tokens[: len(tokens) // piece * piece].reshape(-1, piece)
    chosen = np.linspace(0, len(pieces) - 1, n // piece + 1).astype(int)
    return pieces[chosen].flatten()


@lru_cache
def text_hash(name):
    """That of the text's bytes, as in a log of train.py: the manual is that of the Python here."""
    return hash_of(*text_of(name))


# ---- the runs

def machine(device):
    """Its name, like "H200" or "CPU": two machines round differently."""
    if not device.startswith("cuda"):
        return "CPU"
    return torch.cuda.get_device_name().removeprefix("NVIDIA ")


@lru_cache
def commit():
    """That of this code, or "" where git does not know it, or is not installed."""
    command = ["git", "-C", Path(__file__).parent, "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def train_one(cell, std, rate, seed):
    """The val loss of one run, by the functions of train.py: on a CPU that is faster."""
    config = replace(cell.config(), lr=rate, seed=seed, device="cpu")
    data, val = text_of(cell.text)
    model = cell.model(std, seed)
    optimizer = train.make_optimizer(model, config)
    for step in range(config.steps):
        train.training_step(model, optimizer, data, config, step)
    return train.evaluate(model, val, config)


class Runs:
    """The runs of one cell, kept in a file of lines. A kill loses the group that is trained."""

    def __init__(self, cell, device, at_once):
        self.cell, self.device, self.at_once = cell, device, at_once
        name = "-".join(map(str, vars(cell).values()))
        self.file = OUT / f"{name}.jsonl".replace(" ", "_").replace(",", "").replace("'", "")
        self.losses = {}  # {(std, rate, seed): val loss}
        if self.file.exists():
            place = machine(device), text_hash(cell.text)
            for run in read_runs(self.file):
                if (run["at"], run["data_hash"]) == place:
                    self.losses[run["std"], run["lr"], run["seed"]] = run["val_loss"]

    def make(self, purpose, wanted):
        """Trains those of the wanted (std, rate, seed) that are missing, in groups.

        purpose: "rate" if the run helps to choose one, "reported" if it is at the rate that was
        chosen, or "each rate". A run that is there keeps the purpose that it was made for.
        """
        missing = [run for run in dict.fromkeys(wanted) if run not in self.losses]
        while missing:
            group, missing = missing[: self.at_once], missing[self.at_once :]
            if self.device == "cpu":
                losses = [train_one(self.cell, *run) for run in group]
            else:
                losses = self.train_group(group)
            for (std, rate, seed), loss in zip(group, losses):
                loss = loss if math.isfinite(loss) else math.inf
                self.losses[std, rate, seed] = loss
                run = vars(self.cell) | dict(std=std, lr=rate, seed=seed, purpose=purpose)
                run |= dict(val_loss=loss, at=machine(self.device), commit=commit(),
                            data_hash=text_hash(self.cell.text))
                add_run(self.file, run)
            print(f"{self.file.stem}: {len(self.losses)} runs", flush=True)

    def train_group(self, group):
        """The val losses of these runs, which are trained at once."""
        padded = group + group[-1:] * (self.at_once - len(group))  # one shape is compiled once
        stds, rates, seeds = zip(*padded)
        models = [self.cell.model(std, seed) for std, seed in zip(stds, seeds)]
        trainer = together(self.cell.row, self.cell.head, self.cell.size, self.device)
        text = text_of(self.cell.text)
        losses, _ = trainer.train(models, rates, seeds, self.cell.config(), *text)
        return losses[: len(group)]

    def best_rate(self, std, rates=RATES, seeds=CHOOSE_ON):
        """The rate with the least mean loss. The grid grows until it lies inside."""
        rates = sorted(rates)
        factor = rates[1] / rates[0]
        while True:
            self.make("rate", [(std, rate, seed) for rate in rates for seed in seeds])
            mean = {rate: fmean(self.losses[std, rate, seed] for seed in seeds) for rate in rates}
            best = min(mean, key=mean.get)
            if best == rates[0]:
                rates = [best / factor, *rates]
            elif best == rates[-1]:
                rates = [*rates, best * factor]
            else:
                return best


# ---- which of them are trained

STDS = (1.0, AS_DRAWN)
AT_EACH_RATE = ("softmax", "softmax with a norm", "diff")  # all rates, on five seeds
BETWEEN = (*AT_EACH_RATE, "diff without its second map")  # at a std of 0.2, too
START = (  # with an output layer of their own
    *BETWEEN, "softmax with half the heads", "softmax minus the average", "diff without its norm",
    "diff with λ_init 0.8", "diff with λ_init 0.8, without its second map",
    "softmax with a norm and the factor 0.2", "diff_v2", "gate",
)
V2 = ("softmax", "gate", "diff_v2", "diff_v2 with a plus", "diff_v2 with a smaller plus",
      "two gated maps")
TEXT = (  # with tied embeddings
    "softmax", "softmax with a norm", "softmax with half the heads",
    "softmax with half the heads and a norm", "softmax minus the average", "diff",
    "diff without its second map", "diff without its norm", "diff with its norm from 0.2",
    "diff with λ_init 0.8", "diff with λ_init 0.8, without its second map", "diff_v2", "linear",
    "linear with half the heads and a norm", "linear minus the average",
    "linear with one head of span 4", "diff_linear", "softmax with decay", "linear with decay",
)
PRICE = (570, 645)  # steps: 1.14 and 1.29 times 500, as a step of diff_v2 costs more
MIDDLE = RATES[1:4]  # to begin with: the grid grows if the best one is at its edge
# two more controls of diff_v2, which have not been run
CONTROLS = ("diff_v2 with λ of free sign", "softmax with a norm and the factor 0.2")


def train_cell(cell, stds, rates, choose_on, report_on, device, at_once):
    """For each start of the embedding: the rates, and at the best one the seeds to report."""
    runs = Runs(cell, device, at_once)
    for std in stds:
        best = runs.best_rate(std, rates, choose_on)
        runs.make("reported", [(std, best, seed) for seed in report_on])


def train_at_each_rate(cell, device, at_once):
    """Five seeds at each rate. First all that is reported, of which some of them are a part."""
    train_cell(cell, STDS, RATES, CHOOSE_ON, TWENTY, device, at_once)
    runs = Runs(cell, device, at_once)
    runs.make("each rate", [(std, rate, seed) for std in STDS for rate in RATES for seed in FEW])


def train_longer(cell, steps, rate, seeds, device, at_once):
    """The same with more steps, over which the schedule is stretched, at the rate of the fewer."""
    for n in steps:
        runs = Runs(replace(cell, steps=n), device, at_once)
        runs.make("reported", [(AS_DRAWN, rate, seed) for seed in seeds])


def pieces():
    """{name: a function of device and at_once}, the most important first."""
    found = {}

    def add(name, cell, *plan):  # the stds, the rates, the seeds that choose, those to report
        found[f"{name}: {cell.row}"] = partial(train_cell, cell, *plan)

    for row in START:
        stds = (*STDS, 0.2) if row in BETWEEN else STDS
        add("start", Cell(row, "own"), stds, RATES, CHOOSE_ON, TWENTY)
    for row in V2:
        add("v2", Cell(row, "tied"), [AS_DRAWN], MIDDLE, CHOOSE_V2_ON, FORTY)
    average = "softmax minus a gated average"
    add("v2", Cell(average, "tied"), [AS_DRAWN], MIDDLE, CHOOSE_V2_ON[:4], FORTY)
    add("average", Cell(average, "own"), [AS_DRAWN], MIDDLE, CHOOSE_ON, TWENTY)
    add("average, std 1", Cell(average, "own"), [1.0], RATES[2:5], CHOOSE_ON, TWELVE)
    found["price: softmax"] = partial(
        train_longer, Cell("softmax", "tied"), PRICE, 4e-3, FORTY[:8])
    for row in AT_EACH_RATE:
        found[f"rates: {row}"] = partial(train_at_each_rate, Cell(row, "own"))
    for row in AT_EACH_RATE:
        add("size", Cell(row, "own", size="2.7 M"), STDS, RATES, CHOOSE_ON, TWELVE)
    for row in ("softmax", "diff_v2"):
        for steps in (500, 2000):
            cell = Cell(row, "tied", "library", steps)
            add(f"library after {steps}", cell, [AS_DRAWN], MIDDLE, CHOOSE_ON, TWELVE)
    for row in ("softmax", "diff", "diff without its second map"):
        add("library, std 1", Cell(row, "own", "library", 2000), [1.0], MIDDLE, CHOOSE_ON, TWELVE)
    for row in CONTROLS:
        add("controls", Cell(row, "tied"), [AS_DRAWN], MIDDLE, CHOOSE_V2_ON, FORTY)
    for row in ("diff_v2", "softmax minus a gated average",
                "softmax with a norm and the factor 0.2"):
        add("controls, std 0.2", Cell(row, "own"), [0.2], RATES, CHOOSE_ON, TWENTY)
    for row in TEXT:
        add("text", Cell(row, "tied"), [AS_DRAWN], MIDDLE, CHOOSE_ON, FEW)
    return found


def main(argv=None):
    known = pieces()
    groups = list(dict.fromkeys(name.partition(":")[0] for name in known))
    p = parser("lab.toys", f"{__doc__}\nPieces: {'; '.join(groups)}.")
    p.add_argument("--only", help="pieces to train, or one row of a piece: 'start; v2: diff_v2'")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                   help="on a CPU models are trained one by one")
    p.add_argument("--at_once", type=int, default=24, help="models that are trained together")
    args = p.parse_args(argv)
    wanted = groups if args.only is None else [name.strip() for name in args.only.split(";")]
    for name in wanted:
        if name not in known and name not in groups:
            raise Refused(f"there is no piece {name!r}. There are: {'; '.join(known)}")
    check_settings(replace(train.PRESETS["toy"], device=args.device))
    OUT.mkdir(parents=True, exist_ok=True)
    at_once = 1 if args.device == "cpu" else args.at_once
    for name, run in known.items():
        if name in wanted or name.partition(":")[0] in wanted:
            run(args.device, at_once)


if __name__ == "__main__":
    with one_line():
        main()
