"""
What does the subtraction buy? A look-up among pairs, on which a model trains in seconds.

    python -m lab.lookup            # three models and a picture: a minute or two
    python -m lab.lookup softmax    # the experiment on softmax: hours on one core
    python -m lab.lookup linear     # the experiment on linear attention: more hours
    python -m lab.lookup publish    # tables, data and figures of the arms that are finished

The two experiments go on where they were stopped. They can run side by side, but not one of them
twice. What came of them stands in lab/results/lookup. (Its weights.png is the picture of --seed=3.)

The task. A text is N pairs and then 8 queries. A pair is one token: the embedding of its key plus
that of its value. A query is a key's embedding plus one that says "query", and the answer is the
key's value. There are 4 N keys and 2 N values, and no positions. The model is one block of model.py
with 64 channels. Some texts have a crowd: m of the pairs share one value. The queries ask for pairs
outside the crowd, and all of these have different values.

We train on plain texts, whose values are all different, and test on texts with a crowd. So the
crowd can't teach the model anything: we see what other pairs do to a model that can find a pair.

The law. Let a map give the weight c to every wrong pair and r to the right one. A crowd of m pairs
has the weight m c together, so it outvotes the right one from m = r / c on. If the right logit of a
softmax map is tau, and those of wrong pairs are 0, then r / c = e^tau. (A cap of tau allows logits
down to -tau, but many wrong keys can't all point away from one query.) A minus that takes u away
from every pair moves this border to (r - u) / (c - u), and from u = c on no crowd outvotes. For the
average, u is lambda over the number of tokens. A second map may take less from the right pair.
"""
import argparse
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import model
from common import UserError, cli, commit, device_name, path, random_seed
from lab import report
from lab.sweep import Cache, best_rate
from lab.text import shift

QUERIES = 8
CHANNELS = 64
BATCH = 32
WARMUP = 50
CURVE_EVERY = 500  # steps between two points of a learning curve
TEST_TEXTS = 512  # texts of each crowd in a test
LONG_CROWDS = (64, 256, 1024, 4096)  # beside the N pairs, in texts longer than those of training
LONG_TEXTS = 256  # texts of each of those tests
CROWDS = 16  # where the added pairs are in several crowds
CHOOSE_ON = (1, 2)  # the seeds that choose the rate of an arm
CHOOSE_STEPS = 2000  # longer runs have the rate that is best for so many steps
SEEDS = (3, 4, 5, 6, 7)  # the seeds that are reported
START_RATE = 3e-3
# the arms that are shown, and the rates that `softmax` chose for one head and tau = 2
SHOWN = {"softmax": 4.5e-3, "softmax minus average": 2e-3, "diff": 2e-3}

# ---- the task and its texts


@dataclass(frozen=True)
class Task:
    """What the arms of a comparison share. The defaults are those of the linear arms."""

    pairs: int = 64  # N of the texts of a test, before anything is added to them
    train_pairs: int | list = 64  # N in training, or a list [least, most]: N is drawn for each step
    keys: int = 256  # different keys, of which a text has N
    values: int = 128  # different values
    tau: float | None = None  # the largest logit of a softmax map. None: no cap
    heads: int = 2  # of values. A differential arm has two maps for each of them
    norm: bool = True  # an output norm
    two_tokens: bool = False  # key and value are two tokens, and each token sees the one before it
    steps: int = 8000
    crowd_in_training: bool = False
    lambda_is: str = "learned"  # or "1": it is held at 1 in training


def linear_task(pairs=64, **more):
    return Task(pairs=pairs, train_pairs=pairs, keys=4 * pairs, values=2 * pairs, **more)


def softmax_task(tau, heads=1, **more):
    return Task(tau=tau, heads=heads, steps=1500, **more)


@dataclass
class Texts:
    """B texts of N pairs, in the order in which they were drawn: the crowd comes first.

    The queries ask for the last QUERIES pairs.
    """

    key: torch.Tensor  # (B, N), from 0
    value: torch.Tensor  # (B, N), from 0
    rank: torch.Tensor  # (B, N), random numbers. In the text the pairs stand in their order

    def without(self, m):
        """The same texts without the first m pairs. Without positions there is no gap."""
        return Texts(self.key[:, m:], self.value[:, m:], self.rank[:, m:])

    def split(self, B):
        """The same texts, B at a time."""
        parts = zip(self.key.split(B), self.value.split(B), self.rank.split(B))
        return [Texts(*part) for part in parts]

    def answer(self):
        """(B, QUERIES)"""
        return self.value[:, -QUERIES:]


def make_texts(generator, B, N, m=0, more=0, extra="agree", keys=None, values=None):
    """B texts of N pairs: m in a crowd, and the others with different values.

    `more` pairs are added to them. Their values are not those of the N pairs, and their keys are
    drawn, with repetition, from those that the N pairs don't have. extra: their values agree, or
    all differ, or are those of CROWDS crowds of equal size.
    keys, values: how many there are. None: 4 N and 2 N.
    """
    assert m <= N - QUERIES, "no query asks for a pair in the crowd"
    keys = 4 * N if keys is None else keys
    values = 2 * N if values is None else values
    different = {"agree": 1, "differ": more, "crowds": CROWDS}[extra] if more > 0 else 0
    key = torch.rand(B, keys, generator=generator).argsort(-1)  # all of them, shuffled
    # the first of the shuffled values. To sort all of 8,192 would take longer than the model
    shuffled = torch.rand(B, values, generator=generator)
    value = shuffled.topk(max(2 * N, N + different), largest=False).indices
    free = torch.randint(N, keys, (B, more), generator=generator)
    added = torch.arange(more) % max(1, different)  # which of the different values each pair has
    crowd = value[:, :1].expand(B, m)
    return Texts(
        key=torch.cat((key.gather(1, free), key[:, :N]), dim=1),
        value=torch.cat((value[:, N + added], crowd, value[:, m:N]), dim=1),
        rank=torch.rand(B, more + N, generator=generator),
    )


def test_texts(N, m=0, more=0, B=TEST_TEXTS, agree=True, **of_texts):
    """The same texts for all models, and none was trained on them.

    agree=False: the crowd's pairs keep the different values that were drawn for them.
    """
    generator = torch.Generator().manual_seed(2 * 10**6 + more if more > 0 else 10**6 + m)
    return make_texts(generator, B, N, m if agree else 0, more, **of_texts)


def crowds(N, arm):
    """The sizes of the crowd in a test: many for softmax, where the law tells the border."""
    if arm not in LINEAR:
        return [0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48]
    return [0, N // 8, N // 4, N // 2, 3 * N // 4]


# ---- the arms


def summed(difference):
    """(A_1 + |lambda| A_2) / (1 + |lambda|): two maps, and no minus. A softmax row sums to 1."""

    class Sum(difference):
        def subtract(self, y, lam):
            return super().subtract(y, -lam.abs()) / (1 + lam.abs())

    return Sum


class OwnValue(model.SoftmaxAverage):
    """A - lambda I: in place of the average each token takes away what it would say itself."""

    def maps(self, q, k, rope, log_D):
        A = super().maps(q, k, rope, log_D)[:, 0::2]  # (B, h, rows, T), the last rows of the map
        own = torch.eye(A.shape[-1])[-A.shape[-2] :].expand_as(A)
        return torch.stack((A, own), dim=2).flatten(1, 2)


ARMS = {
    "softmax": model.Softmax,
    "softmax sum": summed(model.Diff),
    "softmax minus average": model.SoftmaxAverage,
    "diff": model.Diff,
    "softmax minus own": OwnValue,
    "diff_v2": model.DiffV2,
    "linear": model.Linear,
    "linear sum": summed(model.DiffLinear),
    "linear minus average": model.LinearAverage,
    "diff_linear": model.DiffLinear,
}
SOFTMAX = list(ARMS)[:4]
LINEAR = list(ARMS)[6:]

# ---- the model


class Reader(model.GPT):
    """One block that reads texts of pairs. It computes the rows of the queries only.

    held_lambda: a number, or None for the learned lambda.
    """

    def __init__(self, arm, task, seed, held_lambda=None):
        name = f"lookup {arm}"
        model.ATTENTION[name] = ARMS[arm]
        config = model.GPTConfig(
            attn=name,
            flash=False,  # the arms are written as maps, and not all of them have the other forms
            n_layer=1,
            n_head=task.heads * ARMS[arm].heads_per_value,
            n_embd=CHANNELS,
            subln=task.norm,  # the same for all arms
            vocab_size=task.keys + task.values + 1,  # and the mark of a query
            rope_theta=0,
        )
        super().__init__(config, seed)
        self.arm = arm
        self.task = task
        self.held_lambda = held_lambda

    def tokens(self, texts):
        """The embedded texts, (B, T, C): a token for each pair, or two, and one for each query."""
        order = texts.rank.argsort(-1)  # which pair stands at each place
        asked = texts.key[:, -QUERIES:]
        value = self.task.keys + texts.value  # the rows behind those of the keys
        mark = torch.full_like(asked, self.task.keys + self.task.values)
        key = self.wte(torch.cat((texts.key.gather(1, order), asked), dim=1))
        value = self.wte(torch.cat((value.gather(1, order), mark), dim=1))
        if self.task.two_tokens:
            N = order.shape[1]
            pairs = torch.stack((key[:, :N], value[:, :N]), dim=2).flatten(1, 2)  # (B, 2 N, C)
            return torch.cat((pairs, key[:, N:] + value[:, N:]), dim=1)
        return key + value

    def maps(self, x):
        """The last rows of the maps, (B, H, QUERIES, T), the values of all tokens, and lambda.

        x (B, T, C) are the tokens, and the values V (B, h, T, d_v). lambda is None where nothing is
        subtracted.
        """
        layer = self.blocks[0].attn
        x = self.blocks[0].norm1(x)
        if self.task.two_tokens:
            x = shift(x)
        q, k, v, lam = layer.project(x)
        q = q[:, :, -QUERIES:]
        if self.task.tau is not None:
            # all queries have one length, and so have all keys: no logit is larger than tau. (The
            # average is a map whose queries are zeros, and they stay zeros.)
            q = self.task.tau * math.sqrt(layer.head_dim) * F.normalize(q, dim=-1)
            k = F.normalize(k, dim=-1)
        position = torch.arange(x.shape[1])
        distance = position[-QUERIES:, None] - position  # (QUERIES, T)
        log_D = model.log_mask(layer.decay_rate(q), distance)
        rope = model.make_rope(position[:1], layer.config, x.dtype)  # it turns nothing: theta is 0
        if lam is not None and lam.ndim > 0:
            lam = lam[:, :, -QUERIES:]  # in DIFF V2 each token has its own
        if self.held_lambda is not None:
            lam = torch.full_like(lam, self.held_lambda)
        return layer.maps(q, k, rope, log_D), v, lam

    def look_up(self, x):
        """What the queries take from each token, (B, h, QUERIES, T), and the values."""
        maps, v, lam = self.maps(x)
        return self.blocks[0].attn.subtract(maps, lam), v

    def read(self, texts, lambdas):
        """The logits of the values at the queries, (B, QUERIES, values), for each lambda.

        A lambda of None is the model's own.
        """
        block = self.blocks[0]
        x = self.tokens(texts)
        maps, v, own = self.maps(x)
        first = self.task.keys  # the row of the first value
        found = []
        for lam in lambdas:
            A = block.attn.subtract(maps, own if lam is None else lam)
            y = x[:, -QUERIES:] + block.attn.output(A @ v)
            y = y + block.mlp(block.norm2(y))
            # the embedding is also the output layer, as in the GPT, but only values can be answers
            found.append(self.norm(y) @ self.wte.weight[first : first + self.task.values].T)
        return found

    def forward(self, texts):
        """The logits with the model's own lambda, (B, QUERIES, values)."""
        return self.read(texts, [None])[0]


def with_lambda(reader, number):
    """The same weights with lambda held at a number, or as learned if it is None.

    One map is then read minus the average. Its own lambda is 0.
    """
    one_map = reader.arm in ("softmax", "linear")
    arm = reader.arm + (" minus average" if one_map else "")
    held = Reader(arm, reader.task, seed=None, held_lambda=number)
    held.load_state_dict(reader.state_dict(), strict=not one_map)
    if one_map:
        nn.init.zeros_(held.blocks[0].attn.lambda_average)
    return held


# ---- training and testing


def train_reader(arm, task, lr, seed):
    """A trained Reader and its learning curve. Every step has new texts, the same for all arms."""
    torch.set_num_threads(1)  # a model this small has nothing to share
    reader = Reader(arm, task, seed, held_lambda=1.0 if task.lambda_is == "1" else None)
    parameters = list(reader.parameters())
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0, fused=True)
    generator = torch.Generator().manual_seed(seed)
    curve = []
    for step in tqdm(range(task.steps), arm, leave=False, disable=None):
        rate = lr * min(1, (step + 1) / WARMUP) * (1 - step / task.steps)
        optimizer.param_groups[0]["lr"] = rate
        N = task.train_pairs
        if isinstance(N, list):
            N = int(torch.randint(N[0], N[1] + 1, (), generator=generator))
        m = 0
        if task.crowd_in_training:
            m = int(torch.randint(3 * N // 4 + 1, (), generator=generator))
        texts = make_texts(generator, BATCH, N, m, keys=task.keys, values=task.values)
        loss = F.cross_entropy(reader(texts).flatten(0, 1), texts.answer().flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if (step + 1) % CURVE_EVERY == 0:
            point = dict(step=step + 1)
            for size in (0, task.pairs // 2):
                test_loss, accuracy = test_on(reader, texts_of(task, size, B=128))
                point |= {f"loss {size}": test_loss, f"accuracy {size}": accuracy}
            curve.append(point)
    return reader, curve


def texts_of(task, m=0, more=0, B=TEST_TEXTS, **more_of_texts):
    """The texts of a test of this task."""
    of_task = dict(keys=task.keys, values=task.values)
    return test_texts(task.pairs, m, more, B, **of_task, **more_of_texts)


@torch.no_grad()
def test_on(reader, texts):
    """(loss, share of right answers) on these texts."""
    logits = reader(texts)
    loss = F.cross_entropy(logits.flatten(0, 1), texts.answer().flatten()).item()
    return loss, (logits.argmax(-1) == texts.answer()).float().mean().item()


@torch.no_grad()
def test_lambdas(reader, extra):
    """A row for each lambda: right answers by test, and how often the answer is a crowd's value.

    A test is a crowd of "16" of the pairs, or "+256" pairs more, whose values are as `extra` says,
    see make_texts. One map is read minus the average, see with_lambda.
    """
    task = reader.task
    lambdas = {"learned": None, 0: 0.0, 0.9: 0.9, 1: 1.0}
    rows = [dict(lambda_test=name, extra=extra, accuracy={}, said_crowd={}) for name in lambdas]
    tests = [(str(m), m, 0, TEST_TEXTS) for m in crowds(task.pairs, reader.arm)]
    tests += [(f"+{more}", 0, more, LONG_TEXTS) for more in LONG_CROWDS]
    reader = with_lambda(reader, reader.held_lambda)
    for name, m, more, B in tests:
        right = torch.zeros(len(lambdas))
        crowd = torch.zeros(len(lambdas))
        texts = texts_of(task, m, more, B, extra=extra)
        for part in texts.split(32):  # the tokens of all of them would need gigabytes
            answer = part.answer()
            wrong = part.value[:, None, : m + more]  # the values of the crowd
            for i, logits in enumerate(reader.read(part, lambdas.values())):
                said = logits.argmax(-1)  # (B, QUERIES)
                right[i] += (said == answer).sum()
                crowd[i] += (said[..., None] == wrong).any(-1).sum()
        answers = B * QUERIES
        for row, n_right, n_crowd in zip(rows, right.tolist(), crowd.tolist()):
            row["accuracy"][name] = round(n_right / answers, 6)
            row["said_crowd"][name] = round(n_crowd / answers, 6)
    return rows


def of_pairs(rows, texts, two_tokens):
    """From rows of a map, (B, H, QUERIES, T): the weights of the pairs, in the order of drawing."""
    place = texts.rank.argsort(-1).argsort(-1)  # where each pair stands
    if two_tokens:
        place = 2 * place + 1  # that of the value, which sees the key
    return rows.gather(-1, place[:, None, None].expand(*rows.shape[:3], -1))


@torch.no_grad()
def weights_of_pairs(reader, texts):
    """What each query takes from each pair, (B, heads, QUERIES, N), in the order of drawing."""
    A, _ = reader.look_up(reader.tokens(texts))
    return of_pairs(A, texts, reader.task.two_tokens)


@torch.no_grad()
def weights_in_training(reader):
    """A dict of r, c, n and lambda.

    r and c are the first map's mean weight on the right and on a wrong pair, n its mean number of
    tokens, and lambda the mean over the queries, or None where nothing is subtracted. The texts
    have no crowd. They are as long as those of the training or, where that length varies, of the
    tests.
    """
    task = reader.task
    N = task.train_pairs if isinstance(task.train_pairs, int) else task.pairs
    texts = test_texts(N, B=64, keys=task.keys, values=task.values)
    maps, _, lam = reader.maps(reader.tokens(texts))
    weights = of_pairs(maps[:, :1], texts, task.two_tokens)  # (B, 1, QUERIES, N)
    right = weights[..., -QUERIES:].diagonal(dim1=-2, dim2=-1)
    wrong = weights.sum() - right.sum()
    c = wrong / (weights.numel() - right.numel())
    tokens = 2 * N if task.two_tokens else N
    return {
        "r": right.mean().item(),
        "c": c.item(),
        "n": tokens + (1 + QUERIES) / 2,  # a query sees those before it
        "lambda": None if lam is None else lam.mean().item(),
    }


def train_and_test(arm, task, lr, seed):
    """A trained Reader, and the JSON row of its run with the row of each test in `tests`."""
    start = time.process_time()  # of this process, whatever else the machine does
    reader, curve = train_reader(arm, task, lr, seed)
    row = dict(arm=arm, **asdict(task), lr=lr, seed=seed) | weights_in_training(reader)
    N = task.pairs
    row |= dict(accuracy_hidden={}, losses={})
    for m in crowds(N, arm):
        texts = texts_of(task, m)
        row["losses"][str(m)], _ = test_on(reader, texts)
        # without the crowd's pairs: is the model right once they are gone?
        _, row["accuracy_hidden"][str(m)] = test_on(reader, texts.without(m))
    row["loss"] = fmean(loss for m, loss in row["losses"].items() if m != "0")
    # in how many rows of the map the right pair weighs most, for each head
    weights = weights_of_pairs(reader, texts_of(task, N // 4, B=128))
    right = torch.arange(N)[-QUERIES:]
    row["largest_is_right"] = (weights.argmax(-1) == right).float().mean((0, 2)).tolist()
    extras = ["agree", "crowds"]
    if task.values > task.pairs + max(LONG_CROWDS, default=0):
        extras.append("differ")
    row["tests"] = [test for extra in extras for test in test_lambdas(reader, extra)]
    row["accuracy"] = row["tests"][0]["accuracy"]
    row |= dict(curve=curve, seconds=round(time.process_time() - start, 1))
    row |= dict(machine=device_name(torch.device("cpu")), commit=commit())
    return reader, row


# ---- the experiment: each arm at its own best rate, chosen on plain texts

TAUS = (1.5, 2.0, 2.5, 3.0, 3.5)
MINUS = ["softmax minus average", "diff"]
# the comparisons: a task, and the arms
EXPERIMENTS = {
    "softmax": [
        *[(softmax_task(tau), SOFTMAX) for tau in (*TAUS, None)],
        *[(softmax_task(tau), ["diff_v2"]) for tau in (2.0, None)],
        *[(softmax_task(2.0, heads), ["softmax"]) for heads in (2, 4)],
        *[(softmax_task(tau, lambda_is="1"), MINUS) for tau in (2.0, 3.5, None)],
    ],
    "linear": [
        (linear_task(), LINEAR),
        (linear_task(steps=2000), LINEAR),
        (linear_task(128), LINEAR),
        (linear_task(128, steps=2000), LINEAR),
        (linear_task(two_tokens=True, steps=2000), LINEAR),
        (linear_task(lambda_is="1"), ["linear minus average"]),
        (linear_task(steps=2000, crowd_in_training=True), ["linear minus average"]),
        (linear_task(128, steps=2000, crowd_in_training=True), ["linear minus average"]),
        (softmax_task(1.0, heads=2, crowd_in_training=True), ["softmax minus average"]),
    ],
}
# Those whose rates are given: rates, and tasks with their arms
RATES = (3e-3, 2e-3, 4.5e-3)  # the middle one is the first to be finished
NEW_SEEDS = (8, 9, 10, 11, 12)
LENGTH_ARMS = ["softmax", *MINUS, "softmax minus own"]
MANY = dict(keys=1024, values=512)  # enough for 256 pairs
MIXED = [16, 256]
GRIDS = {
    # do length, agreement and rate change what a minus does?
    "length": (RATES, [(softmax_task(tau), LENGTH_ARMS) for tau in (2.0, None)]),
    # with so many values all added pairs can differ
    "differ": (RATES, [(softmax_task(tau, values=8192), LENGTH_ARMS) for tau in (2.0, None)]),
    "no_norm": (RATES, [(softmax_task(tau, norm=False), LENGTH_ARMS) for tau in (2.0, None)]),
    # does lambda become large enough if it is learned on texts of many lengths?
    "mixed": (
        RATES[:1],
        [(softmax_task(tau, train_pairs=MIXED, **MANY), MINUS) for tau in (*TAUS, None)],
    ),
    # does it become just large enough for texts of one length?
    "fixed": (
        RATES[:1],
        [(softmax_task(2.0, train_pairs=N, **MANY), MINUS[:1]) for N in (16, 32, 64, 128, 256)],
    ),
}
# the questions about linear maps, fixed before the first run: differences of the mean loss on texts
# with a crowd. Those of 64 pairs and 8,000 steps decide
CONTRASTS = [
    ("diff_linear", "linear sum"),
    ("linear minus average", "linear"),
    ("diff_linear", "linear minus average"),
]
CONTRAST_LEVEL = 0.983  # of their intervals. 1 - 0.05 / 3: together they have an error of 5 %


def run(cache, arm, task, lr, seed):
    """The row of one run."""
    settings = dict(arm=arm, **asdict(task), lr=lr, seed=seed)
    row = cache.run(lambda **_: train_and_test(arm, task, lr, seed)[1], **settings)
    print(f"{arm}, {task.steps} steps, lr {lr:g}, seed {seed}:", row["accuracy"], flush=True)
    return row


def run_arm(cache, arm, task):
    """The rows of an arm: its rate by the loss on plain texts on CHOOSE_ON, then SEEDS."""
    choosing = replace(task, steps=min(task.steps, CHOOSE_STEPS))

    def plain_loss(lr, seed):
        return run(cache, arm, choosing, lr, seed)["losses"]["0"]

    lr = best_rate(plain_loss, START_RATE, CHOOSE_ON, factor=1.5)
    return [run(cache, arm, task, lr, seed) for seed in SEEDS]


def run_grid(cache, rates, tasks):
    """All runs of a grid. Whatever is finished first is complete in itself: a rate, then a seed."""
    for lr in rates:
        for seed in NEW_SEEDS:
            for task, arms in tasks:
                for arm in arms:
                    run(cache, arm, task, lr, seed)


def reported(rows, task, arms):
    """The rows of a task by arm and by seed, without the arms that lack a seed."""
    settings = asdict(task)
    name = ", ".join(f"{key} {value}" for key, value in settings.items() if value)
    found = []
    for arm in arms:
        wanted = settings | dict(arm=arm)
        by_seed = {row["seed"]: row for row in rows if wanted.items() <= row.items()}
        if set(SEEDS) <= set(by_seed):
            found += [by_seed[seed] | dict(task=name) for seed in SEEDS]
    return found


def each_test(rows):
    """The rows as they are published: one for each test of each run, see test_lambdas.

    What is long and belongs to the run stands in the first of its rows only.
    """
    found = []
    for row in rows:
        of_run = {key: value for key, value in row.items() if key != "tests"}
        long = [key for key in ("curve", "losses", "accuracy_hidden") if key in row]
        for i, test in enumerate(row["tests"]):
            found.append(of_run | test | (dict.fromkeys(long) if i > 0 else {}))
    return found


def rows_of_grids(rows):
    """The rows of GRIDS that are finished."""
    tasks = [asdict(task) for _, cells in GRIDS.values() for task, _ in cells]
    return [
        row
        for row in rows
        if row["seed"] in NEW_SEEDS and any(task.items() <= row.items() for task in tasks)
    ]


def border(row):
    """The law's border: the crowd at which half of the answers are right.

    It lies between two sizes that were tested, on a straight line. 0 if fewer are right without a
    crowd, and inf if no crowd of the test is that large.
    """
    points = [(int(m), share) for m, share in row["accuracy"].items() if m[0] != "+"]
    if points[0][1] < 0.5:
        return 0.0
    for (m, more), (next_m, fewer) in zip(points, points[1:]):
        if fewer < 0.5:
            return m + (more - 0.5) / (more - fewer) * (next_m - m)
    return math.inf


# ---- tables and figures, of rows as `reported` gives them


def means_table(runs, numbers, by=("task", "arm")):
    """A row for each task and arm. numbers: a dict for each run, whose None are left out."""
    import pandas as pd

    keys = pd.DataFrame(runs)
    groups = pd.DataFrame(numbers, dtype=float).groupby([keys[key] for key in by], sort=False)
    return groups.mean().reset_index()


def contrast_table(runs):
    """The contrasts of each task, with intervals of CONTRAST_LEVEL."""
    import pandas as pd

    tables = []
    for task, frame in pd.DataFrame(runs).groupby("task", sort=False):
        pairs = [pair for pair in CONTRASTS if set(pair) <= set(frame["arm"])]
        table = report.plus_minus(report.compare(frame, pairs, CONTRAST_LEVEL), "difference")
        table.insert(0, "task", task)
        tables.append(table)
    return pd.concat(tables)


GREEN = "#009E73"
ORANGE = "#D55E00"
GREY = "#AAAAAA"
# the name of an arm in a figure, its colour and its line
LOOKS = {
    "softmax": ("one map", "#0072B2", "-"),
    "softmax sum": ("sum of two", "#56B4E9", "--"),
    "softmax minus average": ("minus average", GREEN, "-"),
    "diff": ("difference", ORANGE, "--"),
}
LOOKS |= {arm: LOOKS[twin] for arm, twin in zip(LINEAR, SOFTMAX)}


def draw_accuracy(ax, runs):
    """Right answers by the size of the crowd: thin for a seed, thick for the mean of an arm."""
    import pandas as pd

    for arm, group in pd.DataFrame(runs, columns=["arm", "accuracy"]).groupby("arm", sort=False):
        name, color, line = LOOKS[arm]
        curves = 100 * pd.DataFrame(list(group["accuracy"]))  # a row for each seed
        curves = curves[[m for m in curves if m[0] != "+"]]
        sizes = [int(m) for m in curves.columns]
        ax.plot(sizes, curves.T, color=color, linewidth=0.8, alpha=0.5)
        ax.plot(sizes, curves.mean(), line, color=color, linewidth=2.5, label=name)
    ax.set(xlabel="pairs that share a value", ylim=(-3, 103))


def crowd_figure(rows):
    """Right answers by the size of the crowd."""
    figure, axes = report.new_figure(columns=2, width=9, height=6, sharey=True)
    draw_accuracy(axes[0], reported(rows, softmax_task(2.0), SOFTMAX))
    draw_accuracy(axes[1], reported(rows, linear_task(), LINEAR))
    axes[0].axvline(math.exp(2), color="black", linestyle=":")  # the law's border
    axes[0].text(math.exp(2) + 1, 50, "$e^{2}$ = 7.4")
    axes[0].set(title="softmax, logits up to 2", ylabel="right answers, %")
    axes[1].set(title="linear attention")
    # an arm of softmax looks like its twin in linear attention
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside upper center", ncols=3,
                  frameon=False)
    return figure


def law_figure(rows):
    """The crowd that outvotes a model against the cap of its logits, beside e^tau."""
    figure, (ax,) = report.new_figure(width=6, height=5)
    largest = max(crowds(64, "softmax"))
    above = largest + 4  # where a model is drawn that no crowd outvotes
    line = [1.4 + 0.05 * i for i in range(46)]
    ax.plot(line, [math.exp(tau) for tau in line], ":", color="black", label=r"$e^\tau$")
    # which models, how far beside the cap they are drawn, and how
    kinds = [
        ("softmax", 1, 0.0, "o"),
        ("softmax", 2, 0.1, "v"),
        ("softmax", 4, 0.2, "*"),
        ("softmax minus average", 1, -0.06, "s"),
        ("diff", 1, 0.06, "^"),
    ]
    for arm, heads, beside, marker in kinds:
        name, color, _ = LOOKS[arm]
        label = name if heads == 1 else f"{heads} heads"
        tasks = [softmax_task(tau, heads) for tau in TAUS]
        runs = [row for task in tasks for row in reported(rows, task, [arm])]
        x = [row["tau"] + beside for row in runs]
        y = [min(border(row), above) for row in runs]
        ax.plot(x, y, marker, color=color, markersize=9, alpha=0.6, label=label)
    ax.axhline(largest, color=GREY, linewidth=0.8)
    ax.text(1.4, above + 2.5, f"not outvoted by {largest}")
    ax.set(xlabel="largest logit τ", ylabel="half are right at", ylim=(0, 60))
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    return figure


def mixed_figure(rows):
    """Right answers beside 256 more pairs that agree, for lambdas learned on mixed lengths."""
    figure, (ax,) = report.new_figure(width=6, height=5)
    kinds = [
        ("diff", "learned", "difference, its own λ", ORANGE, "o--"),
        ("softmax minus average", "learned", "minus average, its own λ", GREEN, "s-"),
        ("softmax minus average", 1, "minus average, λ = 1", GREEN, "s:"),
    ]
    caps = [*TAUS, None]
    for arm, lam, label, color, line in kinds:
        means = []
        for i, tau in enumerate(caps):
            shares = [
                100 * row["accuracy"]["+256"]
                for row in each_test(rows)
                if (row["arm"], row["tau"], row["train_pairs"]) == (arm, tau, MIXED)
                and (row["lambda_test"], row["extra"]) == (lam, "agree")
            ]
            ax.plot([i] * len(shares), shares, line[0], color=color, alpha=0.35)
            means.append(fmean(shares) if shares else math.nan)
        ax.plot(range(len(caps)), means, line, color=color, linewidth=2.5, label=label)
    ax.set_xticks(range(len(caps)), [*map(str, TAUS), "no cap"])
    ax.set(xlabel="largest logit τ", ylabel="right beside 256 more, %", ylim=(-3, 103))
    figure.legend(loc="outside upper center", frameon=False)
    return figure


def two_digits(weight):
    """A weight as a figure says it."""
    rounded = round(weight, 2) + 0.0  # 0.0 and not -0.0
    return f"{rounded:.2f}".replace("-", "−")


def weights_figure(readers, N, m):
    """What one query takes from each pair of a text, and from the same text when m agree.

    The right pair is green, and the m of the crowd are orange.
    readers: {arm or another title: a trained Reader with one head}.
    """
    figure, axes = report.new_figure(2, len(readers), width=9, height=7, sharex=True, sharey=True)
    right = N - QUERIES  # the first query asks for this pair
    for i, ax in enumerate(axes):
        agree = i >= len(readers)  # the second row
        title, reader = list(readers.items())[i % len(readers)]
        weights = weights_of_pairs(reader, test_texts(N, m, agree=agree))[0, 0, 0].tolist()
        numbers = {right: weights[right]}
        ax.bar(range(m, N), weights[m:], 1, color=GREY)
        ax.bar(right, weights[right], 3, color=GREEN)
        if agree:
            numbers[m / 2] = sum(weights[:m])  # they have one value, so they add up
            ax.bar(m / 2, numbers[m / 2], 5, color=ORANGE)
            ax.set_title("outvoted" if numbers[m / 2] > numbers[right] else "not outvoted")
        else:
            ax.bar(range(m), weights[:m], 1, color=ORANGE)
            ax.set_title(LOOKS[title][0] if title in LOOKS else title)
        for x, weight in numbers.items():
            ax.text(x, max(weight, 0) + 0.005, two_digits(weight), ha="center")
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set_xticks([])
        ax.margins(y=0.1)
        ax.locator_params(axis="y", nbins=4)
    axes[0].set_ylabel("none agree")
    axes[len(readers)].set_ylabel(f"{m} agree")
    figure.supylabel("weight", fontsize=18)
    figure.supxlabel(f"the {N} pairs of the text", fontsize=18)
    return figure


def maps_figure(reader, m):
    """The maps of a difference for one text of which m pairs agree, and what the votes come to.

    The pairs are in the order of drawing: first those that agree, and last those that are asked
    for. In the text they stand anywhere. reader: a trained one with one differential head.
    """
    texts = texts_of(reader.task, m, B=1)
    with torch.no_grad():
        branches, _, lam = reader.maps(reader.tokens(texts))
        A = reader.blocks[0].attn.subtract(branches, lam)
    rows = of_pairs(torch.cat((branches, A), dim=1), texts, reader.task.two_tokens)[0]
    N = rows.shape[-1]
    largest = rows.max().item()
    figure, axes = report.new_figure(3, 2, width=9, height=5, width_ratios=[4, 1])
    maps, votes = axes[0::2], axes[1::2]
    names = ("$A_1$", "$A_2$", r"$A_1 - \lambda A_2$")
    for ax, vote, name, weights in zip(maps, votes, names, rows):
        ax.imshow(weights, cmap="RdBu", vmin=-largest, vmax=largest, aspect="auto")
        ax.set(xticks=[], yticks=[])
        ax.axvline(m - 0.5, color="black", linewidth=0.8)
        ax.set_ylabel(name, rotation=0, ha="right", va="center")
        right = weights[:, -QUERIES:].diagonal().mean().item()
        agree = weights[:, :m].sum(-1).mean().item()
        vote.bar([0, 1], [agree, right], color=[ORANGE, GREEN])
        for x, number in enumerate((agree, right)):
            vote.text(x, max(number, 0) + 0.01, two_digits(number), ha="center", fontsize=17)
        vote.axhline(0, color="black", linewidth=0.8)
        vote.set(xticks=[], yticks=[], ylim=(-0.02, 0.32))
        vote.spines[["left", "bottom"]].set_visible(False)
    maps[0].set_title(f"{m} wrong pairs agree", loc="left", color=ORANGE)
    maps[0].set_title("right pairs", loc="right", color=GREEN)
    votes[0].set_title("votes")
    figure.supylabel(f"{QUERIES} questions", fontsize=18)
    maps[2].set_xlabel(f"weight on each of {N} stored pairs")
    return figure


# ---- the verbs


def publish(out):
    """Writes the tables, the data and the figures of all arms that are finished."""
    rows = Cache(out / "runs.jsonl").rows
    runs = []
    for task, arms in EXPERIMENTS["softmax"] + EXPERIMENTS["linear"]:
        runs += reported(rows, task, arms)
    of_grids = rows_of_grids(rows)
    if not runs and not of_grids:
        raise UserError(f"no arm of {out / 'runs.jsonl'} is finished: there is nothing to publish")
    conditions = {"machine": "; ".join(sorted({row["machine"] for row in rows}))}
    if runs:
        laws = [{"half right at": border(row), "lambda": row["lambda"]} for row in runs]
        tables = {
            f"Contrasts of the loss, ± half of a {CONTRAST_LEVEL:.1%} interval":
                contrast_table(runs),
            "Right answers by the crowd": means_table(runs, [row["accuracy"] for row in runs]),
            "Border and lambda": means_table(runs, laws),
        }
        seeds = {"seeds": f"rates chosen on {CHOOSE_ON}, means of {SEEDS}"}
        figure = crowd_figure(rows)
        report.publish(out, "lookup", "The look-up", tables, each_test(rows), conditions | seeds,
                       figure)
        law_figure(rows).savefig(out / "law.png")
    if of_grids:
        tests = each_test(of_grids)
        by = ["tau", "train_pairs", "values", "norm", "lr", "arm", "lambda_test", "extra"]
        texts = [test | {key: str(test[key]) for key in by} for test in tests]
        table = means_table(texts, [test["accuracy"] for test in tests], by)
        seeds = {"seeds": f"means of those of {NEW_SEEDS} that are finished"}
        report.publish(out, "lengths", "Longer texts", {"Right answers": table}, tests,
                       conditions | seeds, mixed_figure(of_grids))


def demo(out, seed):
    """Trains three models with one head and logits up to 2, and shows what a crowd does to them."""
    task = softmax_task(2.0)
    runs = []
    readers = {}
    for arm, lr in SHOWN.items():
        readers[arm], _ = train_reader(arm, task, lr, seed)
        row = dict(arm=arm, **asdict(task), lr=lr, seed=seed, accuracy={})
        for m in crowds(task.pairs, arm):
            _, row["accuracy"][str(m)] = test_on(readers[arm], texts_of(task, m))
        runs.append(row)
    table = means_table(runs, [row["accuracy"] for row in runs], by=["arm"])
    tables = {"Right answers, by how many of the 64 pairs agree": table}
    figure = weights_figure(readers, task.pairs, 16)
    report.publish(out, "demo", "A look-up", tables, runs, dict(seed=seed), figure)
    maps_figure(readers["diff"], 16).savefig(out / "maps.png")


def main(argv=None):
    p = argparse.ArgumentParser(
        prog="python -m lab.lookup",
        description=__doc__.partition("\nThe task.")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("verb", nargs="?", choices=(*EXPERIMENTS, *GRIDS, "publish"))
    p.add_argument("--seed", type=random_seed, default=1, help="of the models without a verb (1)")
    p.add_argument("--out", type=path, default=Path("out/lookup"), help="folder (out/lookup)")
    args = p.parse_args(argv)
    if args.verb is None:
        demo(args.out, args.seed)
    elif args.verb == "publish":
        publish(args.out)
    elif args.verb in GRIDS:
        run_grid(Cache(args.out / "runs.jsonl"), *GRIDS[args.verb])
    else:
        cache = Cache(args.out / "runs.jsonl")
        for task, arms in EXPERIMENTS[args.verb]:
            print(task, flush=True)
            for arm in arms:
                run_arm(cache, arm, task)


if __name__ == "__main__":
    cli(main)
