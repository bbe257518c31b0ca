"""
What does the subtraction buy? A look-up among pairs, on which a model trains in seconds.

    python -m experiments.lookup            # three models and their pictures: a minute or two
    python -m experiments.lookup softmax    # the experiment on softmax: hours on one core
    python -m experiments.lookup linear     # the experiment on linear attention: more hours
    python -m experiments.lookup publish    # tables, data and figures of the arms that are finished

`softmax` and `linear` add a row for each run to out/lookup/runs.jsonl, and go on where they were
stopped. The two can run side by side, but not one of them twice. What came of it, and what we had
predicted, stands in assets/results/lookup.

The arms are kinds of attention. For softmax and for linear attention there are one map, the sum of
two, one map minus the average, and the difference of two. For linear attention there are also two
others whose weights can be negative.

The task. A text is N pairs and then 8 queries. A pair is one token: the embedding of its key plus
that of its value. A query is a key's embedding plus one that says "query", and the answer is the
key's value. There are 4 N keys and 2 N values, and no positions. The model is one block of model.py
with 64 channels. (One comparison has two tokens for a pair, the key and then the value.) Some texts
have a crowd: m of the pairs share one value. The queries ask for pairs outside the crowd, and all
of these have different values.

We train on plain texts, whose values are all different, and test on texts with a crowd. So the
crowd can't teach the model anything: we see what other pairs do to a model that can find a pair.
(Our first experiment, assets/results/crowd, had crowds of 0 to 3 N / 4 pairs in its training texts,
too. A few comparisons here do the same with arms that it lacked.)

The law. Let a map give the weight c to every wrong pair and r to the right one. A crowd of m pairs
has the weight m c together, so it outvotes the right one from m = r / c on. If the right logit of a
softmax map is tau, and those of wrong pairs are 0, then r / c = e^tau. (A cap of tau allows logits
down to -tau, but many wrong keys can't all point away from one query.) A minus that takes u away
from every pair moves this border to (r - u) / (c - u), and from u = c on no crowd outvotes. For the
average, u is lambda over the number of tokens. A second map may take less from the right pair. In a
few comparisons lambda is held at 1.

Words for the tests. Accuracy is "hidden" if the crowd's pairs are left out of the text: it shows
whether the model is right once they are gone. "Long" texts have m agreeing pairs beside N others, so
that they are longer than those of the training.
"""
import argparse
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import report
import train
from data import count
from experiments.sweep import Cache, best_rate
from experiments.text import shift
from model import GPT, GPTConfig, make_rope

QUERIES = 8
CHANNELS = 64
BATCH = 32
WARMUP = 50
CURVE_EVERY = 500  # steps between two points of a learning curve
TEST_TEXTS = 512  # texts of each crowd in a test
LONG_CROWDS = (64, 256, 1024, 4096)  # beside the N pairs, in texts longer than those of training
CHOOSE_ON = (1, 2)  # the seeds that choose the rate of an arm
SEEDS = (3, 4, 5, 6, 7)  # and those that are reported
START_RATE = 3e-3
# the arms that are shown, and the rates that `softmax` chose for one head and tau = 2
SHOWN = {"softmax": 4.5e-3, "softmax minus average": 2e-3, "diff": 2e-3}

# -----------------------------------------------------------------------------
# the arms


@dataclass(frozen=True)
class Arm:
    """An attention of model.py, and what is changed in it."""

    attn: str
    minus_average: bool = False
    weights: str = ""  # "signed" or "delta" take the place of model.py's map
    sum: bool = False  # two maps are added, and not subtracted


# all of them have an output norm. A differential arm has two branches a head
ARMS = {
    "softmax": Arm("softmax"),
    "softmax sum": Arm("diff", sum=True),
    "softmax minus average": Arm("softmax", minus_average=True),
    "diff": Arm("diff"),
    "linear": Arm("linear"),
    "linear sum": Arm("diff_linear", sum=True),
    "linear minus average": Arm("linear", minus_average=True),
    "diff_linear": Arm("diff_linear"),
    "signed": Arm("linear", weights="signed"),
    "delta": Arm("linear", weights="delta"),
}
SOFTMAX = list(ARMS)[:4]
LINEAR = list(ARMS)[4:]
# the questions about linear maps, fixed before the first run: differences of the mean loss on texts
# with a crowd
CONTRASTS = [
    ("diff_linear", "linear sum"),
    ("linear minus average", "linear"),
    ("diff_linear", "linear minus average"),
]
CONTRAST_LEVEL = 0.983  # of their intervals. 1 - 0.05 / 3: together they have an error of 5 %


def signed_map(q, k, mask):
    """The dot product q k itself. It has either sign, so it can't be divided by its row's sum."""
    return q @ k.mT / math.sqrt(q.shape[-1]) * mask


def delta_map(q, k, mask, beta):
    """The delta rule (DeltaNet, arXiv 2406.06484) as a map.

    q and k have length one, and a token writes into the state S only what a look-up of its key does
    not give already:

        u_t = beta_t (v_t - S_t-1 k_t)      S_t = S_t-1 + u_t k_t^T      y_t = S_t q_t

    So (1 + L) U = beta V with L_ts = beta_t k_t k_s for s < t, and A = (q k) (1 + L)^-1 beta.
    """
    q = F.normalize(q, dim=-1)
    k = F.normalize(k, dim=-1)
    L = (beta[..., None] * (k @ k.mT)).tril(-1)
    weights = q @ k.mT * mask
    # unitriangular: the ones of 1 + L need not be there
    weights = torch.linalg.solve_triangular(L, weights, upper=False, left=False, unitriangular=True)
    return weights * beta[..., None, :]


# -----------------------------------------------------------------------------
# the texts


@dataclass
class Texts:
    """B texts of N pairs and QUERIES queries. A token is the sum of two embeddings.

    We call the pairs by the order in which they were drawn: the first m are the crowd, the last
    QUERIES are asked for.
    """

    key: torch.Tensor  # (B, N + QUERIES), a key
    value_or_mark: torch.Tensor  # (B, N + QUERIES), above the keys: a value, or "query"
    answer: torch.Tensor  # (B, QUERIES), the number of the right value, from 0
    place: torch.Tensor  # (B, N), place[b, i] is where pair i stands in text b

    def without(self, m):
        """The same texts without the first m pairs. There are no positions that would have a gap."""
        T = self.key.shape[1]
        shown = torch.ones_like(self.key, dtype=torch.bool)
        shown.scatter_(1, self.place[:, :m], False)
        before = shown.cumsum(-1) - 1  # the new place of each token
        return Texts(
            key=self.key[shown].view(-1, T - m),
            value_or_mark=self.value_or_mark[shown].view(-1, T - m),
            answer=self.answer,
            place=before.gather(1, self.place[:, m:]),
        )


def make_texts(generator, B, N, m):
    """B texts of N pairs, m of them in the crowd."""
    assert m <= N - QUERIES, "no query asks for a pair in the crowd"
    keys = 4 * N
    values = 2 * N
    key = torch.rand(B, keys, generator=generator).argsort(-1)[:, :N]
    value = torch.rand(B, values, generator=generator).argsort(-1)[:, :N]
    value[:, :m] = value[:, :1]  # the crowd
    return mix(generator, key, value, keys, values)


def make_long_texts(generator, B, N, m):
    """B texts of m pairs in a crowd and N others, all different.

    The crowd has the keys that the others don't have, with repetition, and one value of its own.
    """
    keys = 4 * N
    values = 2 * N
    key = torch.rand(B, keys, generator=generator).argsort(-1)
    value = torch.rand(B, values, generator=generator).argsort(-1)
    free = torch.randint(N, keys, (B, m), generator=generator)
    key = torch.cat((key.gather(1, free), key[:, :N]), dim=1)
    value = torch.cat((value[:, N : N + 1].expand(B, m), value[:, :N]), dim=1)
    return mix(generator, key, value, keys, values)


def mix(generator, key, value, keys, values):
    """The Texts of these pairs (B, N), in a random order, with queries for the last QUERIES."""
    B, N = key.shape
    order = torch.rand(B, N, generator=generator).argsort(-1)  # which pair stands at each place
    marks = torch.full((B, QUERIES), keys + values)
    return Texts(
        key=torch.cat((key.gather(1, order), key[:, -QUERIES:]), dim=1),
        value_or_mark=torch.cat((keys + value.gather(1, order), marks), dim=1),
        answer=value[:, -QUERIES:],
        place=order.argsort(-1),
    )


def crowds(N, arm):
    """The sizes of the crowd in a test: more of them for softmax, where the law tells the border."""
    if arm in SOFTMAX:
        return [0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48]
    return [0, N // 8, N // 4, N // 2, 3 * N // 4]


# -----------------------------------------------------------------------------
# the model


@dataclass(frozen=True)
class Task:
    """What the arms of a comparison share. The defaults are those of the linear arms."""

    pairs: int = 64
    tau: float | None = None  # the largest logit of a softmax map. None: no cap
    heads: int = 2
    two_tokens: bool = False  # key and value are two tokens, and each token sees the one before it
    steps: int = 8000
    crowd_in_training: bool = False
    # or "1", or "1 in tests": then it is learned in training, and an arm of one map is trained as it
    # is, and reads the tests minus the average
    lambda_is: str = "learned"
    # the rate is chosen by runs of so many steps. Two tasks that differ in `steps` share these runs
    choose_steps: int = 2000

    def settings(self):
        """The settings that stand in the row of a run."""
        settings = asdict(self)
        del settings["choose_steps"]
        return settings


def softmax_task(tau, heads=1, **more):
    return Task(tau=tau, heads=heads, steps=1500, choose_steps=1500, **more)


class Reader(nn.Module):
    """One block of model.py that reads texts of pairs.

    It has a forward of its own, because it computes the rows of the queries only, and because
    model.py has neither a cap nor a sum nor the last two arms.
    """

    def __init__(self, arm, task, seed):
        super().__init__()
        self.arm = ARMS[arm]
        self.task = task
        two_maps = self.arm.attn in ("diff", "diff_linear")
        self.learns_lambda = two_maps or self.arm.minus_average
        config = GPTConfig(
            attn=self.arm.attn,
            minus_average=not two_maps and (self.arm.minus_average or task.lambda_is != "learned"),
            n_layer=1,
            n_head=2 * task.heads if two_maps else task.heads,  # two of queries make one of values
            n_embd=CHANNELS,
            subln=True,
            vocab_size=6 * task.pairs + 1,  # 4 N keys, 2 N values, and the mark of a query
            rope_theta=0,
        )
        self.gpt = GPT(config, seed)
        self.block = self.gpt.blocks[0]
        self.layer = self.block.attn
        if self.arm.weights == "delta":
            # how much of its value a token writes: the one parameter that model.py doesn't have
            self.beta = nn.Linear(CHANNELS, task.heads, bias=False)
            generator = torch.Generator().manual_seed(seed)
            nn.init.normal_(self.beta.weight, std=1 / math.sqrt(3 * CHANNELS), generator=generator)

    def embed(self, texts):
        """The tokens, (B, T, C): one of them for each pair, or two, and one for each query."""
        key = self.gpt.wte(texts.key)
        value_or_mark = self.gpt.wte(texts.value_or_mark)
        if not self.task.two_tokens:
            return key + value_or_mark
        N = key.shape[1] - QUERIES
        pairs = torch.stack((key[:, :N], value_or_mark[:, :N]), dim=2).flatten(1, 2)  # (B, 2 N, C)
        queries = key[:, N:] + value_or_mark[:, N:]
        return torch.cat((pairs, queries), dim=1)

    def normed_input(self, x):
        """What the attention reads, (B, T, C)."""
        x = self.block.norm1(x)
        return shift(x) if self.task.two_tokens else x

    def get_lambda(self):
        """lambda, which the task may hold at 1. None where nothing is subtracted."""
        learned = self.layer.lambda_full()
        if learned is None:
            return None
        in_tests = self.task.lambda_is == "1 in tests" and not self.training
        if self.task.lambda_is == "1" or in_tests:
            return torch.ones_like(learned)
        return learned if self.learns_lambda else torch.zeros_like(learned)

    def attention_map(self, x):
        """A of the queries, (B, heads, QUERIES, T), from normed_input (B, T, C)."""
        layer = self.layer
        B, T, C = x.shape
        q = layer.q_proj(x[:, -QUERIES:]).view(B, QUERIES, layer.n_head, -1).transpose(1, 2)
        k = layer.k_proj(x).view(B, T, layer.n_head, -1).transpose(1, 2)
        position = torch.arange(T)
        past = position <= position[-QUERIES:, None]  # (QUERIES, T): itself and what is before it
        if self.arm.weights == "signed":
            return signed_map(q, k, past)
        if self.arm.weights == "delta":
            beta = torch.sigmoid(self.beta(x)).transpose(1, 2)  # (B, H, T)
            return delta_map(q, k, past, beta)
        if self.task.tau is not None:  # queries and keys of one length, and a largest logit of tau
            q = self.task.tau * math.sqrt(layer.head_dim) * F.normalize(q, dim=-1)
            k = F.normalize(k, dim=-1)
        rope_k = make_rope(position, layer.config, x.dtype)  # without positions it turns nothing
        rope_q = make_rope(position[-QUERIES:], layer.config, x.dtype)
        lam = self.get_lambda()
        if self.arm.sum:  # A_1 + |lambda| A_2, and rows that sum to 1
            lam = lam.abs()
            return layer.attention_map(q, k, -lam, rope_q, rope_k) / (1 + lam)
        return layer.attention_map(q, k, lam, rope_q, rope_k)

    def forward(self, texts):
        """The logits of the values at the queries, (B, QUERIES, 2 N)."""
        layer = self.layer
        x = self.embed(texts)
        B, T, C = x.shape
        normed = self.normed_input(x)
        v = layer.v_proj(normed).view(B, T, layer.n_value_head, -1).transpose(1, 2)
        y = self.attention_map(normed) @ v  # (B, heads, QUERIES, d_v)
        y = layer.subln(y) * (1 - layer.lambda_init)  # as in Attention.forward
        y = y.transpose(1, 2).reshape(B, QUERIES, C)
        x = x[:, -QUERIES:] + layer.out_proj(y)
        x = x + self.block.mlp(self.block.norm2(x))
        # the embedding is also the output layer, as in the GPT, but only values can be answers
        N = self.task.pairs
        return self.gpt.norm(x) @ self.gpt.wte.weight[4 * N : 6 * N].T


# -----------------------------------------------------------------------------
# training and testing


def train_reader(arm, task, lr, seed, bar=None):
    """A trained Reader and its learning curve. Every step has new texts, the same for all arms."""
    torch.set_num_threads(1)  # a model this small has nothing to share
    model = Reader(arm, task, seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0, fused=True)
    generator = torch.Generator().manual_seed(seed)
    curve = []
    for step in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / WARMUP) * (1 - step / task.steps)
        m = 0
        if task.crowd_in_training:
            # one m for the whole batch: a text does not know the crowds of the others anyway
            m = int(torch.randint(3 * task.pairs // 4 + 1, (), generator=generator))
        texts = make_texts(generator, BATCH, task.pairs, m)
        loss = F.cross_entropy(model(texts).flatten(0, 1), texts.answer.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if bar is not None:
            bar.update()
        if (step + 1) % CURVE_EVERY == 0:
            point = dict(step=step + 1)
            for size in (0, task.pairs // 2):
                test_loss, accuracy = test_on(model, test_texts(task.pairs, size, 128))
                point |= {f"loss {size}": test_loss, f"accuracy {size}": accuracy}
            curve.append(point)
    return model, curve


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def test_generator(m):
    """Where the texts of a test with a crowd of m come from: no model was trained on these."""
    return torch.Generator().manual_seed(10**6 + m)


def test_texts(pairs, m, B=TEST_TEXTS):
    """The same texts for every model."""
    return make_texts(test_generator(m), B, pairs, m)


@torch.no_grad()
def test_on(model, texts):
    """(loss, share of right answers) on these texts. The loss of a run that diverged is inf."""
    logits = model(texts)
    loss = F.cross_entropy(logits.flatten(0, 1), texts.answer.flatten()).item()
    if not math.isfinite(loss):
        loss = math.inf
    return loss, (logits.argmax(-1) == texts.answer).float().mean().item()


@torch.no_grad()
def weights_of_pairs(model, texts):
    """What each query takes from each pair, (B, heads, QUERIES, N), in the order of drawing."""
    A = model.attention_map(model.normed_input(model.embed(texts)))  # (B, heads, QUERIES, T)
    place = texts.place
    if model.task.two_tokens:
        place = 2 * place + 1  # that of the value, which sees the key
    return A.gather(-1, place[:, None, None].expand(*A.shape[:3], -1))


def largest_is_right(model, texts):
    """For each head, the share of the queries' rows in which the right pair weighs most."""
    first = weights_of_pairs(model, texts).argmax(-1)  # (B, heads, QUERIES)
    right = torch.arange(QUERIES) + model.task.pairs - QUERIES
    return (first == right).float().mean((0, 2)).tolist()


def train_and_test(arm, task, lr, seed, bar=None):
    """A trained Reader, and the JSON row of its run."""
    start = time.process_time()  # of this process, whatever else the machine does
    model, curve = train_reader(arm, task, lr, seed, bar)
    lam = model.get_lambda()
    model.eval()
    N = task.pairs
    losses = {}
    accuracy = {}
    hidden = {}
    for m in crowds(N, arm):
        texts = test_texts(N, m)
        losses[str(m)], accuracy[str(m)] = test_on(model, texts)
        _, hidden[str(m)] = test_on(model, texts.without(m))
    long = {}
    if not task.two_tokens:  # the T x T numbers of the delta rule would not fit into memory
        for m in LONG_CROWDS:
            texts = make_long_texts(torch.Generator().manual_seed(2 * 10**6 + m), 32, N, m)
            _, long[str(m)] = test_on(model, texts)
    with_crowd = [loss for m, loss in losses.items() if m != "0"]
    found = {"lambda": None if lam is None else lam.item()} | dict(
        accuracy=accuracy,
        accuracy_hidden=hidden,
        accuracy_long=long,
        losses=losses,
        loss=mean(with_crowd),
        largest_is_right=largest_is_right(model, test_texts(N, N // 4, 128)),
        curve=curve,
        seconds=round(time.process_time() - start, 1),
        machine=train.device_name(torch.device("cpu")),
        commit=report.commit(),
    )
    return model, dict(arm=arm, **task.settings(), lr=lr, seed=seed) | found


def run_once(arm, lr, seed, **settings):
    """The row of a run whose Task has these settings."""
    _, row = train_and_test(arm, Task(**settings), lr, seed)
    return row


# -----------------------------------------------------------------------------
# the experiment: each arm at its own best rate, chosen on plain texts


# the heading of a comparison on the page, its task, and its arms
SOFTMAX_EXPERIMENT = [
    ("Softmax, one head, τ = 2", softmax_task(2.0), SOFTMAX),
    ("Softmax, two heads, τ = 2", softmax_task(2.0, heads=2), ["softmax"]),
    ("Softmax, four heads, τ = 2", softmax_task(2.0, heads=4), ["softmax"]),
    ("Softmax, one head, τ = 1.5", softmax_task(1.5), SOFTMAX),
    ("Softmax, one head, τ = 2.5", softmax_task(2.5), SOFTMAX),
    ("Softmax, one head, τ = 3", softmax_task(3.0), SOFTMAX),
    ("Softmax, one head, τ = 3.5", softmax_task(3.5), SOFTMAX),
    ("Softmax, one head, no cap", softmax_task(None), SOFTMAX),
    ("Softmax, one head, τ = 2, λ = 1 in the tests",
     softmax_task(2.0, lambda_is="1 in tests"), ["softmax", "softmax minus average", "diff"]),
    ("Softmax, one head, τ = 2, λ = 1",
     softmax_task(2.0, lambda_is="1"), ["softmax minus average", "diff"]),
    ("Softmax, one head, τ = 3.5, λ = 1 in the tests",
     softmax_task(3.5, lambda_is="1 in tests"), ["softmax", "softmax minus average", "diff"]),
    ("Softmax, one head, τ = 3.5, λ = 1",
     softmax_task(3.5, lambda_is="1"), ["softmax minus average", "diff"]),
    ("Softmax, one head, no cap, λ = 1 in the tests",
     softmax_task(None, lambda_is="1 in tests"), ["softmax", "softmax minus average", "diff"]),
    ("Softmax, one head, no cap, λ = 1",
     softmax_task(None, lambda_is="1"), ["softmax minus average", "diff"]),
]
LINEAR_EXPERIMENT = [
    ("Linear attention, 8,000 steps", Task(), LINEAR),
    ("Linear attention, 2,000 steps", Task(steps=2000), LINEAR),
    ("Linear attention, 128 pairs, 8,000 steps", Task(pairs=128), LINEAR),
    ("Linear attention, 128 pairs, 2,000 steps", Task(pairs=128, steps=2000), LINEAR),
    ("Linear attention, key and value as two tokens, 2,000 steps",
     Task(two_tokens=True, steps=2000), LINEAR[:4]),
    ("Linear attention, 128 pairs, 8,000 steps, λ = 1 in the tests",
     Task(pairs=128, lambda_is="1 in tests"), ["linear minus average", "diff_linear"]),
    ("Linear attention, key and value as two tokens, 2,000 steps, λ = 1 in the tests",
     Task(two_tokens=True, steps=2000, lambda_is="1 in tests"),
     ["linear minus average", "diff_linear"]),
    ("Linear attention, 8,000 steps, λ = 1 in the tests",
     Task(lambda_is="1 in tests"), ["linear", "linear minus average", "diff_linear"]),
    ("Linear attention, 8,000 steps, λ = 1", Task(lambda_is="1"), ["linear minus average"]),
    # assets/results/crowd has the other arms
    ("Trained with crowds, 2,000 steps", Task(steps=2000, crowd_in_training=True),
     ["linear minus average"]),
    ("Trained with crowds, 128 pairs, 2,000 steps",
     Task(pairs=128, steps=2000, crowd_in_training=True), ["linear minus average"]),
    ("Trained with crowds, softmax, two heads, τ = 1",
     softmax_task(1.0, heads=2, crowd_in_training=True), ["softmax minus average"]),
]


def run_arm(cache, arm, task):
    """The rows of an arm: its rate by the loss on plain texts on CHOOSE_ON, then SEEDS."""

    def row(task, lr, seed):
        found = cache.run(run_once, **task.settings(), arm=arm, lr=lr, seed=seed)
        accuracy = " ".join(f"{m}:{a:.3f}" for m, a in found["accuracy"].items())
        print(f"  {arm}, {task.steps} steps, lr {lr:g}, seed {seed}: {accuracy}", flush=True)
        return found

    choosing = replace(task, steps=task.choose_steps)
    if task.lambda_is == "1 in tests":
        choosing = replace(choosing, lambda_is="learned")  # the models are the same

    def plain_loss(lr, seed):
        return row(choosing, lr, seed)["losses"]["0"]

    assert not set(CHOOSE_ON) & set(SEEDS), "a run that chooses a rate must not be reported"
    lr = best_rate(plain_loss, START_RATE, CHOOSE_ON, factor=1.5)
    return [row(task, lr, seed) for seed in SEEDS]


# -----------------------------------------------------------------------------
# tables and figures


def border(row):
    """The law's border: the crowd at which half of the answers are right.

    It lies between two sizes that were tested, on a straight line. 0 if fewer are right without a
    crowd. None if no crowd of the test is that large.
    """
    points = [(int(m), accuracy) for m, accuracy in row["accuracy"].items()]
    if points[0][1] < 0.5:
        return 0.0
    for (m, more), (next_m, fewer) in zip(points, points[1:]):
        if fewer < 0.5:
            return m + (more - 0.5) / (more - fewer) * (next_m - m)
    return None


def reported(rows, task, arms):
    """The rows of a task in the order of SEEDS, {arm: rows}, without the arms that lack a seed."""
    found = {}
    for arm in arms:
        wanted = task.settings() | dict(arm=arm)
        by_seed = {}
        for row in rows:
            if all(row.get(name) == value for name, value in wanted.items()):
                by_seed[row["seed"]] = row
        if set(SEEDS) <= set(by_seed):
            found[arm] = [by_seed[seed] for seed in SEEDS]
            assert len({row["lr"] for row in found[arm]}) == 1, f"{arm} has runs at two rates"
    return found


def seeds_of(rows, what, m):
    """The values of all seeds in one cell, per cent: "28 27 28"."""
    return " ".join(f"{100 * row[what][m]:.0f}" for row in rows)


def accuracy_table(found, what="accuracy"):
    """A row for each arm: the per cent of right answers by the size of the crowd, all seeds."""
    import pandas as pd

    table = []
    for arm, rows in found.items():
        cells = {f"m = {m}": seeds_of(rows, what, m) for m in rows[0][what]}
        table.append({"arm": arm, **cells})
    return pd.DataFrame(table)


def summary_table(found):
    """A row for each arm: its rate, lambda, losses, border, and how often the right pair leads."""
    import pandas as pd

    table = []
    for arm, rows in found.items():
        lambdas = [row["lambda"] for row in rows if row["lambda"] is not None]
        if ARMS[arm].sum:
            lambdas = [abs(lam) for lam in lambdas]  # it adds |lambda| A_2
        borders = [border(row) for row in rows]
        first = [mean(row["largest_is_right"]) for row in rows]
        table.append({
            "arm": arm,
            "lr": rows[0]["lr"],
            "loss, plain texts": f"{mean(row['losses']['0'] for row in rows):.3f}",
            "loss, with crowds": f"{mean(row['loss'] for row in rows):.3f}",
            "half right at a crowd of": " ".join("–" if b is None else f"{b:.1f}" for b in borders),
            "right pair has the largest weight": f"{mean(first):.0%}",
            "lambda": " ".join(f"{lam:.2f}" for lam in lambdas) or "–",
        })
    return pd.DataFrame(table)


def contrast_table(found):
    """The contrasts between the arms that are there. Those of 64 pairs and 8,000 steps decide."""
    import pandas as pd

    runs = pd.DataFrame([row for rows in found.values() for row in rows])
    pairs = [(arm, base) for arm, base in CONTRASTS if arm in found and base in found]
    table = []
    for row in report.compare(runs, pairs, CONTRAST_LEVEL).to_dict("records"):
        table.append({
            "contrast": f"{row['arm']} − {row['base']}",
            "difference of the loss": f"{row['difference']:+.3f}",
            f"{100 * CONTRAST_LEVEL:.1f} % interval": f"{row['low']:+.3f} to {row['high']:+.3f}",
        })
    return pd.DataFrame(table)


def tables_of(heading, found):
    """The tables of one comparison, {their headings: table}."""
    tables = {}
    contrasts = contrast_table(found)
    if len(contrasts) > 0:
        tables[f"{heading}: contrasts"] = contrasts
    tables[f"{heading}: right answers, %, by the crowd m"] = accuracy_table(found)
    tables[f"{heading}: the same without the crowd's pairs"] = accuracy_table(
        found, "accuracy_hidden"
    )
    if any(rows[0]["accuracy_long"] for rows in found.values()):
        tables[f"{heading}: m agreeing pairs beside the others"] = accuracy_table(
            found, "accuracy_long"
        )
    tables[f"{heading}: rates, losses, borders, lambdas"] = summary_table(found)
    return tables


BLUE = "#0072B2"
LIGHT_BLUE = "#56B4E9"
GREEN = "#009E73"
ORANGE = "#D55E00"
GREY = "#AAAAAA"
# the name of an arm in a figure, its colour and its line
LOOKS = {
    "softmax": ("one map", BLUE, "-"),
    "softmax sum": ("sum of two", LIGHT_BLUE, "--"),
    "softmax minus average": ("minus average", GREEN, "-"),
    "diff": ("difference", ORANGE, "--"),
    "linear": ("one map", BLUE, "-"),
    "linear sum": ("sum of two", LIGHT_BLUE, "--"),
    "linear minus average": ("minus average", GREEN, "-"),
    "diff_linear": ("difference", ORANGE, "--"),
    "signed": ("signed", GREY, "-."),
    "delta": ("delta rule", "black", "-."),
}


def draw_curve(ax, rows, what, label, color, line):
    """The per cent of right answers of one arm: thin for a seed, thick for the mean."""
    sizes = [int(m) for m in rows[0][what]]
    curves = []
    for row in rows:
        curve = [100 * accuracy for accuracy in row[what].values()]
        curves.append(curve)
        ax.plot(sizes, curve, color=color, linewidth=0.8, alpha=0.5)
    middle = [mean(column) for column in zip(*curves)]
    ax.plot(sizes, middle, line, color=color, linewidth=2.5, label=label)


def draw_accuracy(ax, found, tau=None):
    """Right answers by the size of the crowd, a curve for each arm."""
    for arm, rows in found.items():
        draw_curve(ax, rows, "accuracy", *LOOKS[arm])
    if tau is not None:
        ax.axvline(math.exp(tau), color="black", linestyle=":")
        ax.text(math.exp(tau) + 1, 50, f"$e^{{{tau:g}}}$ = {math.exp(tau):.1f}")
    ax.set_xlabel("pairs that share a value")
    ax.set_ylabel("right answers, %")
    ax.set_ylim(-3, 103)


def crowd_figure(softmax, linear):
    figure, (left, right) = report.new_figure(columns=2, width=9, height=6, sharey=True)
    draw_accuracy(left, softmax, tau=2.0)
    left.set_title("softmax, logits up to 2")
    draw_accuracy(right, linear)
    right.set_title("linear attention")
    right.set_ylabel("")
    handles = {}  # an arm of softmax looks like its twin in linear attention
    for ax in (left, right):
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels())))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3,
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
        x = []
        y = []
        for tau in (1.5, 2.0, 2.5, 3.0, 3.5):
            for row in reported(rows, softmax_task(tau, heads), [arm]).get(arm, []):
                x.append(tau + beside)
                crowd = border(row)
                y.append(above if crowd is None else crowd)
        ax.plot(x, y, marker, color=color, markersize=9, alpha=0.6, label=label)
    ax.axhline(largest, color=GREY, linewidth=0.8)
    ax.text(1.4, above + 2.5, f"not outvoted by {largest}")
    ax.set_xlabel("largest logit τ")
    ax.set_ylabel("half are right at")
    ax.set_ylim(0, 60)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    return figure


def long_figure(rows):
    """Right answers in texts longer than those of the training, with the learned lambda and with 1."""
    figure, axes = report.new_figure(columns=3, width=9, height=6, sharey=True)
    panels = [
        ("softmax, τ = 2", softmax_task(2.0), ["softmax", "softmax minus average", "diff"]),
        ("softmax, no cap", softmax_task(None), ["softmax", "softmax minus average", "diff"]),
        ("linear", Task(), ["linear", "linear minus average", "diff_linear"]),
    ]
    for ax, (title, task, arms) in zip(axes, panels):
        ax.set_title(title)
        for arm, runs in reported(rows, task, arms).items():
            name, color, _ = LOOKS[arm]
            draw_curve(ax, runs, "accuracy_long", name, color, ":")
        for arm, runs in reported(rows, replace(task, lambda_is="1 in tests"), arms).items():
            name, color, _ = LOOKS[arm]
            draw_curve(ax, runs, "accuracy_long", f"{name}, λ = 1", color, "-")
        ax.set_xscale("log", base=2)
        ax.set_xticks([64, 512, 4096], ["64", "512", "4,096"])
    axes[0].set_ylabel("right answers, %")
    axes[0].set_ylim(-3, 103)
    axes[1].set_xlabel("agreeing pairs, added to the 64")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2,
                  frameon=False)
    return figure


def weights_figure(models, pairs, m):
    """Why: what one query takes from each value of a text, and from the same text when m agree.

    models: {arm or another title: a trained Reader}. A column shows the head that most often finds
    the right pair.
    """
    figure, axes = report.new_figure(2, len(models), width=9, height=7, sharex=True, sharey=True)
    crowded = test_texts(pairs, m)
    plain = make_texts(test_generator(m), TEST_TEXTS, pairs, 0)  # the same draws, no crowd
    for column, (arm, model) in enumerate(models.items()):
        shares = largest_is_right(model, crowded)
        head = shares.index(max(shares))
        above = axes[column]
        above.set_title(LOOKS[arm][0] if arm in LOOKS else arm)
        weights = weights_of_pairs(model, plain)[0, head, 0]  # (N,), of the first query
        draw_weights(above, weights, m)
        above.bar(range(m), weights[:m], 1, color=ORANGE)

        below = axes[len(models) + column]
        weights = weights_of_pairs(model, crowded)[0, head, 0]
        draw_weights(below, weights, m)
        votes = weights[:m].sum().item()  # they have one value, so they add up
        below.bar(m / 2, votes, 5, color=ORANGE)
        write_above(below, m / 2, votes)
    for ax in axes:
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set_xticks([])
        ax.margins(y=0.1)
        ax.locator_params(axis="y", nbins=4)
    axes[0].set_ylabel("none agree")
    axes[len(models)].set_ylabel(f"{m} agree")
    return figure


def draw_weights(ax, weights, m):
    """The weight of each pair that is not in the crowd, and of the right one with its number."""
    right = len(weights) - QUERIES  # what the first query asks for
    ax.bar(range(m, len(weights)), weights[m:], 1, color=GREY)
    ax.bar(right, weights[right], 3, color=GREEN)
    write_above(ax, right, weights[right].item())


def write_above(ax, x, weight):
    said = round(weight, 2) + 0.0  # 0.0 and not -0.0
    ax.text(x, max(weight, 0) + 0.005, f"{said:.2f}", ha="center")


# -----------------------------------------------------------------------------
# the verbs


def experiment(comparisons, args):
    """Trains all that these comparisons need, and writes a row for each run."""
    cache = Cache(args.out / "runs.jsonl")
    for heading, task, arms in comparisons:
        print(heading, flush=True)
        for arm in arms:
            run_arm(cache, arm, task)


def publish(args):
    """Writes the tables, the data and the figures of all arms that are finished.

    They are lookup.md, lookup.json, lookup.png (right answers by the crowd), law.png (the border by
    the cap), long.png (longer texts) and weights.png, for which three models are trained again.
    """
    rows = Cache(args.out / "runs.jsonl").rows
    tables = {}
    for heading, task, arms in SOFTMAX_EXPERIMENT + LINEAR_EXPERIMENT:
        found = reported(rows, task, arms)
        if found:
            tables |= tables_of(heading, found)
    if not tables:
        raise ValueError(f"no arm of {args.out / 'runs.jsonl'} is finished, so there is nothing "
                         "to publish")
    conditions = {
        "seeds": f"rates chosen on {CHOOSE_ON}, these are {SEEDS}, side by side in a cell",
        "precision": "float32",
        "machine": "; ".join(sorted({row["machine"] for row in rows if "machine" in row})),
    }
    softmax = reported(rows, softmax_task(2.0), SOFTMAX)
    linear = reported(rows, Task(), LINEAR)
    figure = crowd_figure(softmax, linear) if softmax and linear else None
    command = "python -m experiments.lookup publish"  # --out says nothing about the runs
    report.publish(args.out, "lookup", "The look-up", tables, rows, conditions, figure, command)
    if softmax:
        law_figure(rows).savefig(args.out / "law.png")
        long_figure(rows).savefig(args.out / "long.png")
    if set(SHOWN) <= set(softmax):
        models = {}
        for arm in SHOWN:
            row = softmax[arm][0]
            models[arm], _ = train_reader(arm, softmax_task(2.0), row["lr"], row["seed"])
        weights_figure(models, 64, 16).savefig(args.out / "weights.png")


def demo(args):
    """Trains three models with one head and logits up to 2, and shows what a crowd does to them."""
    task = softmax_task(2.0)
    found = {}
    models = {}
    with tqdm(total=task.steps * len(SHOWN), unit=" steps", mininterval=1) as bar:
        for arm, lr in SHOWN.items():
            bar.set_description(arm)
            models[arm], row = train_and_test(arm, task, lr, args.seed, bar)
            found[arm] = [row]
    tables = {"Right answers in per cent, where m of the pairs agree": accuracy_table(found)}
    figure, (ax,) = report.new_figure(width=6, height=4.5)
    draw_accuracy(ax, found, task.tau)
    ax.legend(loc="center right")
    conditions = {
        "task": f"{task.pairs} pairs a text; guessing finds 1 %",
        "trained on": f"texts in which no pairs agree, {task.steps} steps, seed {args.seed}",
    }
    title = "A look-up among 64 pairs, when some of the others agree"
    runs = [row for rows in found.values() for row in rows]
    report.publish(args.out, "demo", title, tables, runs, conditions, figure)
    weights_figure(models, task.pairs, 16).savefig(args.out / "demo_weights.png")
    print(f"the picture is {args.out}/demo.png, the data {args.out}/demo.json, and "
          f"{args.out}/demo_weights.png shows the weights behind it")


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m experiments.lookup",
        description=__doc__.partition("\nThe task.")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("verb", nargs="?", choices=("softmax", "linear", "publish"),
                        help="without one: see it in a minute")
    parser.add_argument("--seed", type=count, default=1, help="of the models without a verb (1)")
    parser.add_argument("--out", type=Path, default=Path("out/lookup"),
                        help="folder for all of it (out/lookup)")
    args = parser.parse_args(argv)
    if args.verb == "softmax":
        experiment(SOFTMAX_EXPERIMENT, args)
    elif args.verb == "linear":
        experiment(LINEAR_EXPERIMENT, args)
    elif args.verb == "publish":
        publish(args)
    else:
        demo(args)


if __name__ == "__main__":
    train.cli(main)
