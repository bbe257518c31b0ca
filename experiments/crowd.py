"""
When does the difference of two attention maps help? A task of seconds that answers it, with a law.

    python -m experiments.crowd maps      # trains one diff_linear and draws its maps: half a minute
    python -m experiments.crowd law       # the law on an untrained layer: seconds
    python -m experiments.crowd train     # every arm on the task: some four hours of one core
    python -m experiments.crowd phase     # capped softmax, by sharpness and length: two to three h
    python -m experiments.crowd figure    # tables and figures of all runs that are there

`train` and `phase` append one JSON line for each finished run to <out>/runs.jsonl. A run that is
in the file is not trained again, so they can be stopped anywhere and go on with the same command.

The task. A text is N pairs and then 8 queries. A pair is one token: the embedding of its key plus
that of its value. A query is a key's embedding plus one that says "query", and its value must come.
m of the pairs, the crowd, share one value. The queries ask for pairs outside the crowd, and all of
these have different values. There are 4 N keys and 2 N values. The model is one block of model.py
without positions: 64 channels, 4 heads, or 2 heads of two branches in the differential arms. Each
training step takes 32 new texts of the same m, drawn evenly from 0 to 3 N / 4.

The law. Let a map put the weight c on every wrong pair and c + D on the right one. Then the crowd
gets m c and the answer c + D: one positive map counts votes and fails at m0 = 1 + D / c. Each
branch of a differential head is divided by its own sum, so A_1 - lambda A_2 has (1 - lambda) c in
the place of c: it fails at m0 / (1 - lambda). A softmax map whose largest logit is tau fails at
e^tau.

What we predicted, committed before the runs, and what came (means over seeds 3 to 7, or 3 to 5 in
items 12 to 14 and 19; a test has crowds of m = 0, N/8, N/4, N/2 and 3N/4, and accuracy is the mean
over them where no m is given; N = 32 where no other number is given):

1.  The law, N = 64, untrained: the crowd at which half of the answers are wrong is 2.2 without a
    difference and within a third of 2.2 / (1 - lambda) for lambda = 0.25, 0.5, 0.75, 0.9; for
    lambda = 1 it is never reached. Softmax capped at tau = 1, 2, 3: within a third of e^tau = 2.7,
    7.4, 20; minus the uniform map: never.
    - Yes with keys of standard deviation 3 (2.3, 2.8, 4.4, 9.1, 29, never) and for softmax (2.5,
      6.6, 15, never). With keys of 1 it is 1.5 for lambda = 0, and then up to a third less than
      1.5 / (1 - lambda), since the second map also gives some weight to the right pair. The law is
      (bump - lambda dip) / (1 - lambda): bump and dip are what the maps give to the right
      pair, in units of what a wrong one gets.
2.  Trained, N = 32, accuracy at m = 0, 8, 24: softmax and diff 0.99 or more at every m.
    - Yes: 1.000.
3.  linear 0.88 to 0.96. With two heads (the heads and the state of diff_linear) 0.75 to 0.88 at
    m = 0 and lower at m = 24. With one head below 0.6 at m = 24: several heads can subtract one
    output from another in out_proj, one head can't.
    - 0.93 (0.87 to 0.96), and 0.79 with two heads (0.86 at m = 0, 0.65 at m = 24). With two heads
      and the norm 0.84; some seeds fall with m and others rise, so training finds ways around the
      crowd. With one head no: 0.70. That map is not positive and flat, as in the law, but sharp:
      it learned to put 0.67 of its weight on the right pair.
4.  diff_linear 0.99 or more with the norm and 0.97 or more without it. lambda rises from 0.2 to
    above 0.8 in every seed.
    - Yes: 0.996 (0.996 to 0.997) and 0.980 (0.970 to 0.984); lambda 0.99 and 0.90.
5.  A plus in the place of the minus, with a lambda of free sign: lambda ends below -0.7, and
    the accuracy is that of diff_linear, within 0.03. A plus that must stay one,
    (A_1 + |lambda| A_2) / (1 + |lambda|): no better than linear with two heads, within 0.03.
    - The accuracy yes, 0.982 (0.965 to 0.993), lambda in three seeds of five: they made the minus
      (lambda -0.85 to -0.89, accuracy 0.991 to 0.993). Two stayed at a plus of 0.94 and 0.96, and
      have 0.965 and 0.968. The plus that must stay one has 0.83, but its seeds reach from 0.55 to
      0.97.
6.  lambda held at 0, 0.25, 0.5, 0.75, 0.9: accuracy rises at every step (with the norm, m = 0) from
    that of linear with two heads, within 0.05, to 0.97 or more. 1.0 is not below 0.75.
    - No, it rises only to 0.75: 0.60, 0.82, 0.92, 0.992, then 0.990 and 0.993 (m = 0). It starts
      far below linear with two heads and the norm (0.81), which has twice the features. At N = 64
      the mean over the crowds is 0.35, 0.47, 0.68, 0.81, 0.88, 0.84. A learned lambda has 0.92,
      which is not told apart from one that is held at 0.9.
7.  The norm changes linear's accuracy by less than 0.05: it doesn't subtract.
    - Not decided: 0.93 to 0.89 (-0.17 to 0.10), and 0.79 to 0.84 with two heads (-0.02 to 0.11).
8.  Signed features without a difference (no phi, no row sums, a norm): 0.95 or more with four
    heads, 0.98 or more with two. So what counts is the sign, not that there are two maps.
    - Both numbers yes: 0.960 (0.937 to 0.979) and 0.994. The conclusion no, see 11 and 20.
9.  The delta rule, keys of length one: 0.9 or more with four heads, 0.97 or more with two.
    - Yes: 0.978 and 0.997. With two heads it is level with diff_linear, and better at N = 64 and
      128.
10. Decay doesn't help against a crowd: linear with decay is more than 0.1 below linear, diff_linear
    with decay is below diff_linear.
    - linear has 0.738, 0.188 below, but the interval is -0.378 to 0.003. diff_linear falls from
      0.996 to 0.986 (-0.012 to -0.008).
11. N = 64: linear below 0.8 at m = 0 and below 0.5 at the largest crowd, diff_linear above 0.9.
    - 0.49 and 0.41, with two heads 0.64 and 0.39, and diff_linear 0.919. But with two heads and the
      norm linear rises with the crowd, from 0.44 to 0.67, and so does diff_linear (0.86 to 0.99),
      see 16. Not predicted: signed features, level with the difference at 32 pairs, fall behind it
      (0.814). The delta rule doesn't (0.947).
12. Capped softmax with a norm: one map is right in half of its answers (mean over the crowds) at
    e^tau = 1 + N / 16, that is at tau = 1.1, 1.6, 2.2, 2.8, 3.5 for N = 32, 64, 128, 256, 512. (The
    line is drawn through two points of a prototype, N = 32 and 128; the others are unseen.) The
    difference is at 0.95 or more for tau >= 1 up to N = 128. Its border depends on N and hardly on
    tau: where it is right at tau = 2, it is right at tau = 0.5 too.
    - Softmax with 4 heads passes one half at tau = 0.75, 1.3, 2.35 for N = 32, 64, 128
      (interpolated between 0.5 and 1, 1 and 1.5, 2 and 3): within 0.35 of the line, and steeper.
      With 2 heads, as many as the difference has, it needs up to 0.15 more. The difference has
      0.995 and more up to N = 64 at tau >= 1, and 0.82, 0.95, 0.995 at tau = 1, 1.5, 2 for N = 128.
      So its border does depend on tau: 0.53 at tau = 0.5, where it has 1.00 and 0.97 for N = 32 and
      64. Longer texts need more steps, see 14.
13. The same with four times the steps, N = 128. When we predicted this, we knew two such runs of
    softmax with 4 heads (0.18 and 0.91 at tau = 1.5). It is

        python -m experiments.crowd phase --pairs=128 --tau=1,1.5,2 --steps=6000 --seed=3,4,5

    Softmax is below 0.1 at tau = 1 and above 0.95 at tau = 2, so its border is near 1.4 in the
    place of 2.35: it moves, and there is still one. The difference is above 0.99 at all three.
    - With 4 heads yes, but for the border: 0.03, 0.26 (0.09 to 0.51), 0.995 at tau = 1, 1.5, 2, so
      it is at 1.7 by interpolation. With 2 heads no at tau = 2: 0.03, 0.21, 0.61 (0.42 to 1.00).
      The difference has 0.993, 0.999, 1.000. At tau = 1.5 rate and seed decide: 1e-3 was chosen on
      seeds 1 and 2, and seed 3 has 0.09 at that rate and 0.91 at 3e-3.
14. A length that item 12 left out, N = 256, with 6,000 steps and --choose_on=1 --seed=3,4,5. At
    tau = 2 softmax with 4 heads is below 0.3, with 2 heads below 0.2, and the difference above 0.9.
    At tau = 3 all three are above 0.8.
    - tau = 2: 0.26 (0.06 to 0.57) with 4 heads, but 0.53 (0.05 to 0.84) with 2 heads. The
      difference has 0.973 (0.928 to 0.997). tau = 3: 0.999 with 2 heads and for the difference.
      With 4 heads two seeds have 0.99 and 1.00, and one next to nothing (0.008).
15. N = 64 with four times the steps, 8,000. When we predicted this, we knew that with N = 32 and
    four times the steps linear with two heads and the norm is above 0.99 in four seeds of five.
    Here it is above 0.7 (0.52 with 2,000 steps), and diff_linear above 0.98.
    - Yes, 0.822 (0.772 to 0.883), and no, 0.975 (0.972 to 0.978). So of the difference of 0.404
      after 2,000 steps 0.153 is left.
16. Why a larger crowd makes it easier, N = 64: with a larger crowd there are fewer other pairs. So
    the same texts are read a second time with the crowd's pairs hidden. In linear with two heads
    and the norm the crowd costs accuracy, 0.1 or more at m = 48. In diff_linear it costs less than
    0.02 at every m.
    - linear only as a mean: 0.11 at m = 48. In four seeds of five it is less than 0.03, and in the
      fifth 0.53 (0.35, and 0.88 with the crowd hidden). diff_linear no: 0.03 to 0.04 at m = 8 and
      16, and less than 0.01 at 48. Not predicted: of the 15 models of linear (4 heads, 2 heads, 2
      heads with the norm) seven get worse with the crowd, as in the law. They have 0.61 to 0.77 at
      m = 0. The other eight get better, but start at 0.18 to 0.54. So after 2,000 steps no linear
      both withstands the crowd and tells many pairs apart, and diff_linear does. After 8,000 steps
      the crowd costs linear with two heads and the norm less than 0.05 in each of five seeds.
17. Item 5 at N = 64: the plus that must stay one has less than 0.6, so at least 0.3 less than
    diff_linear. The plus of free sign has 0.85 or more.
    - Yes: 0.553 (0.420 to 0.623), which is 0.366 (0.270 to 0.463) less. The plus of free sign has
      0.865 (0.805 to 0.913), and all five seeds made the minus (lambda -0.98 or -0.99).
18. N = 512 at tau = 2 with 6,000 steps, as in item 14. One map is below 0.05 with 4 heads and below
    0.1 with 2 heads, and the difference above 0.5.
    - The difference no. None of the three learns anything in so many steps (rates 3e-3 and 1e-2,
      seed 1). All have 0.001, and their loss is that of a guess, so we trained no other seeds.
19. tau = 5 for N = 32, 64 and 128 with 1,500 steps: all three are above 0.99. lambda is smaller
    than at tau = 3 for each N.
    - Yes, but for softmax with 2 heads and N = 128, which has 0.980 (0.939 in one seed, 1.000 in
      two). lambda is 0.49, 0.69, 0.69, and was 0.80, 0.90, 0.92.
20. The hidden crowd of item 16 for signed features and the delta rule, both with two heads: the
    crowd costs less than 0.05 at every m.
    - The delta rule yes, 0.03 at most. Signed features no: 0.11 at m = 32 (0.02 to 0.15), where
      they have 0.85 with the crowd and 0.97 without it. So at N = 64 the sign alone does not
      free them of the crowd.

And what we had not predicted. Without the norm the difference is not enough at N = 64 and 128:
diff_linear has 0.66 and 0.004, linear with two heads 0.54 and 0.004. With four times the steps
linear attention with two heads and the norm has 0.996 or more in four seeds and 0.856 in one, and
with four heads 0.958 (0.914 to 0.994; N = 32): in most seeds it can do without the difference. And
lambda is smaller where one map can be sharp: in capped softmax it ends at 0.99, 0.97, 0.92 for
tau = 1, 1.5, 2 (N = 32, rate 3e-3).
"""
import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
import torch.nn.functional as F

import report
from experiments.grid import finished_lines, in_processes
from flags import comma_list, int_from_0, positive_int, positive_number
from model import GPT, GPTConfig, distances, log_mask, phi

QUERIES = 8
CHANNELS = 64
BATCH = 32
WARMUP = 50
TEST_TEXTS = 512  # texts of each crowd in a test
# an arm is tried at RATES, and then at the neighbours of its best rate, until both have been tried
RATES = (3e-3, 1e-2)
LADDER = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
CHOOSE_SEEDS = (1, 2)  # the rate of an arm is chosen on these
REPORT_SEEDS = (3, 4, 5, 6, 7)  # and what is reported comes from these


@dataclass(frozen=True)
class Arm:
    """How an attention differs from the others. The first four fields are GPTConfig's."""

    attn: str
    n_head: int = 4  # a differential arm has half as many heads, of two branches each
    subln: bool = False
    decay: bool = False
    weights: str = ""  # "signed" or "delta": see Reader.one_map
    combine: str = "minus"  # how the branches become one map: see Reader.join
    frozen_lambda: float | None = None  # None: lambda is learned, from 0.2


# the arms, in the order in which they are trained: what matters most comes first
CORE = {
    "linear": Arm("linear"),
    "linear 2 heads": Arm("linear", n_head=2),
    "linear 2 heads norm": Arm("linear", n_head=2, subln=True),
    "diff_linear": Arm("diff_linear"),
    "diff_linear norm": Arm("diff_linear", subln=True),
    "softmax": Arm("softmax"),
    "diff norm": Arm("diff", subln=True),
    "linear norm": Arm("linear", subln=True),
}
DOSE = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
DOSES = {f"lambda={dose} norm": Arm("diff_linear", subln=True, frozen_lambda=dose) for dose in DOSE}
CONTROLS = {
    "mean norm": Arm("diff_linear", subln=True, combine="mean"),
    "plus norm": Arm("diff_linear", subln=True, combine="plus"),
    "signed 2 heads norm": Arm("linear", n_head=2, subln=True, weights="signed"),
    "signed norm": Arm("linear", subln=True, weights="signed"),
    "delta 2 heads norm": Arm("linear", n_head=2, subln=True, weights="delta"),
    "delta norm": Arm("linear", subln=True, weights="delta"),
    "linear 1 head norm": Arm("linear", n_head=1, subln=True),
}
MORE = {
    "linear decay": Arm("linear", decay=True),
    "diff_linear norm decay": Arm("diff_linear", subln=True, decay=True),
    "softmax norm": Arm("softmax", subln=True),
    "softmax 2 heads norm": Arm("softmax", n_head=2, subln=True),
    "diff": Arm("diff"),
    "mean": Arm("diff_linear", combine="mean"),
    "plus": Arm("diff_linear", combine="plus"),
    "linear 1 head": Arm("linear", n_head=1),
    "delta": Arm("linear", weights="delta"),
    **{f"lambda={dose}": Arm("diff_linear", frozen_lambda=dose) for dose in DOSE},
}
ARMS = CORE | DOSES | CONTROLS | MORE
HARDER = (
    "linear", "linear 2 heads", "linear 2 heads norm", "diff_linear norm", "signed 2 heads norm",
    "delta 2 heads norm", "softmax", "diff norm", "diff_linear")


@dataclass(frozen=True)
class Group:
    """Arms that are trained on the same task, in this order."""

    arms: tuple
    pairs: int = 32
    steps: int = 1500


GROUPS = {
    "core": Group(tuple(CORE)),
    "dose": Group(tuple(DOSES)),
    "controls": Group(tuple(CONTROLS)),
    "64": Group((*HARDER, *DOSES, "mean norm", "plus norm"), pairs=64, steps=2000),
    # is linear attention only slower to learn it?
    "longer": Group(("linear", "linear 2 heads norm", "diff_linear norm"), steps=6000),
    "64-longer": Group(("linear 2 heads norm", "diff_linear norm"), pairs=64, steps=8000),
    "more": Group(tuple(MORE)),
    "128": Group(HARDER, pairs=128, steps=2000),
}

# the phase diagram: one capped softmax map and the difference of two, both with the norm
PHASE_ARMS = ("softmax norm", "softmax 2 heads norm", "diff norm")
PHASE_PAIRS = (32, 64, 128)  # 256 and more need more steps than these, see the docstring
PHASE_STEPS = 1500
PHASE_TAU = (0.5, 1.0, 1.5, 2.0, 3.0, 5.0)


@dataclass(frozen=True)
class Run:
    """What makes a run the run it is."""

    arm: str  # a name in ARMS
    lr: float
    seed: int
    pairs: int = 32
    steps: int = 1500
    tau: float | None = None  # the largest logit of a capped softmax, None: no cap


@dataclass
class Texts:
    """B texts of N pairs and QUERIES queries. A token is the sum of two embeddings, key and other.

    We call the pairs by the order in which they were drawn: the first m are the crowd, the last
    QUERIES are asked for."""

    key: torch.Tensor  # (B, N + QUERIES), a key
    other: torch.Tensor  # (B, N + QUERIES), above the keys: a value, or the mark of a query
    answer: torch.Tensor  # (B, QUERIES), the number of the right value, from 0
    place: torch.Tensor  # (B, N), where each pair stands in the text


def make_texts(generator, B, N, m):
    """B texts of N pairs, m of them in the crowd."""
    keys, values = 4 * N, 2 * N
    key = torch.rand(B, keys, generator=generator).argsort(-1)[:, :N]
    value = torch.rand(B, values, generator=generator).argsort(-1)[:, :N]
    value[:, :m] = value[:, :1]  # the crowd
    order = torch.rand(B, N, generator=generator).argsort(-1)  # which pair stands at each place
    marks = torch.full((B, QUERIES), keys + values)
    return Texts(
        key=torch.cat((key.gather(1, order), key[:, -QUERIES:]), dim=1),
        other=torch.cat((keys + value.gather(1, order), marks), dim=1),
        answer=value[:, -QUERIES:],
        place=order.argsort(-1),
    )


def crowds(N):
    """The sizes of the crowd in a test: from none to three quarters of the pairs."""
    return [0, N // 8, N // 4, N // 2, 3 * N // 4]


def softmax_map(q, k, mask, tau=None):
    """softmax(q k / sqrt(d)), or with queries and keys of one length and a largest logit of tau."""
    if tau is None:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
    else:
        scores = tau * F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    return torch.softmax(scores + mask.log(), dim=-1)


def linear_map(q, k, mask):
    """phi(q) phi(k) over the sum of its row."""
    weights = phi(q) @ phi(k).mT * mask
    return weights / weights.sum(-1, keepdim=True)


def signed_map(q, k, mask):
    """q k as it is, of either sign, which can't be divided by the sum of its row."""
    return q @ k.mT / math.sqrt(q.shape[-1]) * mask


def delta_map(q, k, mask, beta):
    """The delta rule (DeltaNet, arXiv 2406.06484) as a map. q and k have length one, and a token
    writes into the state S only what a look-up of its key does not give already:

        u_t = beta_t (v_t - S_t-1 k_t)      S_t = S_t-1 + u_t k_t^T      y_t = S_t q_t

    So (1 + L) U = beta V with L_ts = beta_t k_t k_s for s < t, and A = (q k) (1 + L)^-1 beta."""
    q = F.normalize(q, dim=-1)
    k = F.normalize(k, dim=-1)
    L = (beta[..., None] * (k @ k.mT)).tril(-1)
    weights = q @ k.mT * mask
    # unitriangular: the ones of 1 + L need not be there
    weights = torch.linalg.solve_triangular(L, weights, upper=False, left=False, unitriangular=True)
    return weights * beta[..., None, :]


class Reader(nn.Module):
    """One block of model.py that reads texts of pairs.

    The block's attention is model.py's, but only the rows of the queries are computed: nothing else
    is asked for, and a step is two to six times as fast. A test holds the rows to layer.map's."""

    def __init__(self, run):
        super().__init__()
        arm = ARMS[run.arm]
        N = run.pairs
        self.arm = arm
        self.tau = run.tau
        self.pairs = N
        config = GPTConfig(
            attn=arm.attn, n_layer=1, n_head=arm.n_head, n_embd=CHANNELS, subln=arm.subln,
            decay=arm.decay, block_size=N + QUERIES, vocab_size=6 * N + 1, rope_theta=0)
        self.gpt = GPT(config, run.seed)
        self.layer = self.gpt.blocks[0].attn
        if arm.weights == "delta":
            # how much of its value a token writes: the one parameter that model.py doesn't have
            self.beta = nn.Linear(CHANNELS, arm.n_head, bias=False)
            generator = torch.Generator().manual_seed(run.seed)
            nn.init.normal_(self.beta.weight, std=1 / math.sqrt(3 * CHANNELS), generator=generator)
        rate = self.layer.decay_rate("cpu", torch.float32)  # (H, 1, 1), zero without decay
        mask = log_mask(rate, distances(N + QUERIES, "cpu")).exp()  # gamma^(i - j) for j <= i
        self.register_buffer("mask", mask[:, N:])  # (H, QUERIES, T): the rows of the queries

    def lambda_full(self):
        if self.arm.frozen_lambda is not None:
            return torch.tensor(self.arm.frozen_lambda)
        return self.layer.lambda_full()

    def one_map(self, q, k, x, mask):
        """The map of each branch, (B, H, QUERIES, T)."""
        if self.arm.weights == "signed":
            return signed_map(q, k, mask)
        if self.arm.weights == "delta":
            beta = torch.sigmoid(self.beta(x)).transpose(1, 2)  # (B, H, T)
            # the last query's row: a pair that is hidden from it writes nothing, too
            return delta_map(q, k, mask, beta * mask[..., -1, :])
        if self.arm.attn in ("linear", "diff_linear"):
            return linear_map(q, k, mask)
        return softmax_map(q, k, mask, self.tau)

    def join(self, A):
        """The branches' maps to one map a head, (B, H / 2, QUERIES, T)."""
        if self.layer.branches == 1:
            return A
        first = A[:, 0::2]
        second = A[:, 1::2]
        lam = self.lambda_full()
        if self.arm.combine == "plus":
            return first + lam * second
        if self.arm.combine == "mean":  # a plus that stays one, and whose rows sum to 1
            return (first + lam.abs() * second) / (1 + lam.abs())
        return first - lam * second

    def branch_maps(self, x, mask=None):
        """The map of each branch, from the normalised input of the layer."""
        mask = self.mask if mask is None else mask
        layer = self.layer
        B, T, C = x.shape
        q = layer.q_proj(x[:, self.pairs :]).view(B, QUERIES, layer.n_head, -1).transpose(1, 2)
        k = layer.k_proj(x).view(B, T, layer.n_head, -1).transpose(1, 2)
        return self.one_map(q, k, x, mask)

    def embed(self, texts):
        return self.gpt.wte(texts.key) + self.gpt.wte(texts.other)

    def mask_without_crowd(self, texts, m):
        """The mask that hides the crowd's pairs, (B, H, QUERIES, T)."""
        shown = torch.ones(len(texts.place), self.mask.shape[-1])
        shown = shown.scatter(-1, texts.place[:, :m], 0.0)
        return self.mask * shown[:, None, None, :]

    def forward(self, texts, mask=None):
        """The logits of the values at the queries, (B, QUERIES, 2 N)."""
        layer = self.layer
        block = self.gpt.blocks[0]
        x = self.embed(texts)
        B, T, C = x.shape
        normed = block.norm1(x)
        v = layer.v_proj(normed).view(B, T, layer.n_value_head, -1).transpose(1, 2)
        y = self.join(self.branch_maps(normed, mask)) @ v  # (B, heads, QUERIES, their size)
        if layer.subln is not None:
            y = layer.subln(y) * (1 - layer.lambda_init)
        y = y.transpose(1, 2).reshape(B, QUERIES, C)
        x = x[:, self.pairs :] + layer.out_proj(y)
        x = x + block.mlp(block.norm2(x))
        # the embedding is also the output layer, as in the GPT, but only values can be answers
        values = self.gpt.wte.weight[4 * self.pairs : 6 * self.pairs]
        return self.gpt.norm(x) @ values.T


def learning_rate(step, run):
    """Warm-up, and linear decay to zero."""
    return run.lr * min(1, (step + 1) / WARMUP) * (1 - step / run.steps)


def train_reader(run):
    """A trained Reader. Every step has new texts, the same ones for all arms of a seed."""
    model = Reader(run)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0, fused=True)
    generator = torch.Generator().manual_seed(run.seed)
    largest = crowds(run.pairs)[-1]
    for step in range(run.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, run)
        # one m for the whole batch: a text does not know the crowds of the others anyway
        m = int(torch.randint(largest + 1, (), generator=generator))
        texts = make_texts(generator, BATCH, run.pairs, m)
        loss = F.cross_entropy(model(texts).flatten(0, 1), texts.answer.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


@torch.no_grad()
def attention_on(model, texts):
    """What the queries give to the right pair and to all other pairs: mean over heads and texts.

    Signed sums, and the right pair's share of the absolute weights (as in Table 3 of
    arXiv 2410.05258, where weights on other pairs count whatever their sign)."""
    A = model.join(model.branch_maps(model.gpt.blocks[0].norm1(model.embed(texts))))
    A = A[..., : model.pairs]  # without the queries' own cells
    asked = texts.place[:, None, -QUERIES:, None].expand(-1, A.shape[1], -1, -1)
    right = A.gather(-1, asked)[..., 0]
    share = right.abs() / A.abs().sum(-1)
    return {
        "right": right.mean().item(),
        "others": (A.sum(-1) - right).mean().item(),
        "share of the right": share.mean().item(),
    }


def share_of_right(logits, texts):
    return (logits.argmax(-1) == texts.answer).float().mean().item()


@torch.no_grad()
def test_reader(model):
    """Accuracy by crowd, and with the crowd hidden, the mean loss over the crowds, lambda, and
    where the attention goes."""
    accuracy = {}
    hidden = {}
    losses = []
    for m in crowds(model.pairs):
        # the same texts for every model, which no model was trained on
        texts = make_texts(torch.Generator().manual_seed(10**6 + m), TEST_TEXTS, model.pairs, m)
        logits = model(texts)
        losses.append(F.cross_entropy(logits.flatten(0, 1), texts.answer.flatten()).item())
        accuracy[str(m)] = share_of_right(logits, texts)
        hidden[str(m)] = share_of_right(model(texts, model.mask_without_crowd(texts, m)), texts)
        if m == model.pairs // 4:
            attention = attention_on(model, texts)
    return {
        "accuracy": accuracy,
        "mean accuracy": sum(accuracy.values()) / len(accuracy),
        "accuracy without the crowd": hidden,
        "loss": sum(losses) / len(losses),
        "lambda": float(model.lambda_full()) if model.layer.branches == 2 else None,
        "attention": attention,
    }


def do_run(run):
    """Trains and tests: the run's line in the file."""
    torch.set_num_threads(1)  # a model this small has nothing to share
    start = time.process_time()  # of this process, whatever else the machine does
    model = train_reader(run)
    result = test_reader(model)
    return asdict(run) | result | {"seconds": round(time.process_time() - start, 1)}


class Runs:
    """The finished runs of a folder, and the way to make more of them."""

    def __init__(self, out, procs):
        self.file = out / "runs.jsonl"
        self.procs = procs
        self.rows = {}  # Run: its line in the file
        out.mkdir(parents=True, exist_ok=True)
        for row in finished_lines(self.file):
            self.keep(row)

    def keep(self, row):
        names = Run.__dataclass_fields__
        self.rows[Run(**{name: row[name] for name in names})] = row

    def finish(self, runs):
        """Trains those of `runs` that are not in the file, and writes them in their order, each
        when it has ended. Returns how many there were."""
        missing = [run for run in dict.fromkeys(runs) if run not in self.rows]
        for number, row in enumerate(in_processes(do_run, missing, self.procs), 1):
            with self.file.open("a") as f:
                f.write(json.dumps(row) + "\n")
            self.keep(row)
            print(f"{number}/{len(missing)} {row['arm']}, {row['pairs']} pairs, tau {row['tau']}, "
                  f"lr {row['lr']:g}, seed {row['seed']}: accuracy {row['mean accuracy']:.3f}, "
                  f"loss {row['loss']:.3f}, {row['seconds']} s", flush=True)
        return len(missing)

    def best_rate(self, like):
        """The rate with the least mean loss on CHOOSE_SEEDS, of the runs that are like this one but
        for their rate and seed. None if there are none."""
        losses = {}
        for run, row in self.rows.items():
            if run.seed in CHOOSE_SEEDS and replace(run, lr=like.lr, seed=like.seed) == like:
                # a loss that is not finite is the worst
                loss = row["loss"] if math.isfinite(row["loss"]) else math.inf
                losses.setdefault(run.lr, []).append(loss)
        return min(losses, key=lambda lr: sum(losses[lr]) / len(losses[lr]), default=None)


def choose_rates(runs, likes, choose_seeds):
    """Trains each of `likes` at several rates on `choose_seeds`, for Runs.best_rate.

    The rates and seeds that stand in `likes` don't matter.
    """
    wanted = {like: RATES for like in likes}
    while runs.finish([replace(like, lr=lr, seed=seed)
                       for like in likes for lr in wanted[like] for seed in choose_seeds]):
        for like in likes:
            # a best rate at the edge of what was tried is not known to be the best
            best = LADDER.index(runs.best_rate(like))
            wanted[like] = LADDER[max(0, best - 1) : best + 2]


def train(runs, args):
    """Trains the arms of the groups that were asked for."""
    names = args.groups.split(",")
    for name in names:
        if name not in GROUPS:
            raise ValueError(f"--groups={name} is none of {', '.join(GROUPS)}")
    for name in names:
        group = GROUPS[name]
        likes = [Run(arm, 0, 0, group.pairs, args.steps or group.steps) for arm in group.arms]
        choose_rates(runs, likes, args.choose_on)
        runs.finish([replace(like, lr=runs.best_rate(like), seed=seed)
                     for like in likes for seed in args.seed])


def phase(runs, args):
    """Capped softmax, one map and the difference, over length and sharpness.

    Each cell has its own rate: a cell that can't learn can't choose a rate for the others."""
    steps = args.steps or PHASE_STEPS
    fewest = 4 * QUERIES  # a quarter of the pairs is never in the crowd, and can be asked for
    if min(args.pairs) < fewest:
        raise ValueError(f"--pairs takes numbers from {fewest} on")
    for N in args.pairs:
        likes = [Run(arm, 0, 0, N, steps, tau) for tau in args.tau for arm in PHASE_ARMS]
        choose_rates(runs, likes, args.choose_on)
        runs.finish([replace(like, lr=runs.best_rate(like), seed=seed)
                     for seed in args.seed for like in likes])


def failing_crowd(A):
    """The crowd at which half of the answers are wrong, interpolated. NaN: none up to the largest.

    A (texts, N): what the query gives to each pair, the last of which is asked for. The crowd is
    the first m pairs. An answer is right if its pair has more than all of the crowd together, and
    more than each pair outside it."""
    largest = A.shape[1] - QUERIES
    right = A[:, -1:]
    crowd = A.cumsum(-1)[:, :largest]  # of 1, 2, ... pairs
    rival = A[:, :-1].flip(-1).cummax(-1).values.flip(-1)  # the largest of the pairs from here on
    is_right = (right > crowd) & (right > rival[:, 1 : largest + 1])
    accuracy = [1.0, *is_right.float().mean(0).tolist()]
    for m in range(1, largest + 1):
        if accuracy[m] < 0.5:
            return m - 1 + (accuracy[m - 1] - 0.5) / (accuracy[m - 1] - accuracy[m])
    return math.nan


def law(N=64, texts=2000, heads=4, d=16):
    """The law on an untrained layer, whose queries are the random keys that they look for.

    Two tables say at which crowd half of the answers are wrong: for linear attention by lambda, for
    softmax by its largest logit. In the second branch of diff_linear the keys have the other sign,
    so that the right pair has a dip where the first has a bump. bump and dip are its weight over a
    wrong pair's: a crowd of m wins where (1 - lambda) m > bump - lambda dip."""
    mask = torch.ones(heads, 1, N)
    doses = []
    for std in (1.0, 3.0):
        k = std * torch.randn(texts, heads, N, d, generator=torch.Generator().manual_seed(0))
        q = k[:, :, -1:]
        first = linear_map(q, k, mask).mean(1)[:, 0]  # (texts, N), the mean over heads
        second = linear_map(q, -k, mask).mean(1)[:, 0]
        bump = (first[:, -1].mean() / first[:, :-1].mean()).item()
        dip = (second[:, -1].mean() / second[:, :-1].mean()).item()
        for lam in DOSE:
            times = 1 / (1 - lam) if lam < 1 else math.inf
            doses.append({
                "std of keys": std,
                "lambda": lam,
                "measured": failing_crowd(first - lam * second),
                "m0 / (1 - lambda)": bump * times,
                "(bump - lambda dip) / (1 - lambda)": (bump - lam * dip) * times,
            })
    caps = []
    for tau in (1.0, 2.0, 3.0, 5.0):
        A = softmax_map(q, k, mask, tau).mean(1)[:, 0]
        caps.append({
            "tau": tau,
            "one map": failing_crowd(A),
            "e^tau": math.exp(tau),
            "minus the uniform map": failing_crowd(A - 1 / N),
        })
    return pd.DataFrame(doses), pd.DataFrame(caps)


def one_row_a_run(runs):
    """All finished runs as a data frame."""
    rows = []
    for row in runs.rows.values():
        row = dict(row)
        for m, accuracy in row.pop("accuracy").items():
            row[f"m={m}"] = accuracy
        # runs from before this was measured don't have it
        for m, accuracy in row.pop("accuracy without the crowd", {}).items():
            row[f"hidden, m={m}"] = accuracy
        for name, value in row.pop("attention").items():
            row[f"attention, {name}"] = value
        rows.append(row)
    return pd.DataFrame(rows)


def reported(runs, df):
    """The runs that count: on seeds on which no rate was chosen, and at the rate that was."""
    counts = []
    for run in runs.rows:
        counts.append(run.seed not in CHOOSE_SEEDS and run.lr == runs.best_rate(run))
    return df[counts]


def accuracy_table(df):
    """A row for each arm of one length: accuracy by crowd, and its mean over the crowds with the
    least and the largest of the seeds."""
    sizes = [f"m={m}" for m in crowds(df["pairs"].iloc[0])]
    rows = []
    for arm, group in df.groupby("arm", sort=False):
        row = {"arm": arm, "n": len(group), "lr": group["lr"].iloc[0]}
        for size in sizes:
            row[size] = f"{group[size].mean():.3f}"
        mean = group["mean accuracy"]
        row["mean (least to largest)"] = f"{mean.mean():.3f} ({mean.min():.3f} to {mean.max():.3f})"
        row["loss"] = f"{group['loss'].mean():.3f}"
        row["lambda"] = "–"
        if ARMS[arm].attn.startswith("diff"):
            values = group["lambda"].abs() if ARMS[arm].combine == "mean" else group["lambda"]
            row["lambda"] = f"{values.mean():.2f}"
        for name in ("right", "others", "share of the right"):
            row[name] = f"{group[f'attention, {name}'].mean():.3f}"
        rows.append(row)
    return pd.DataFrame(rows)


def hidden_table(df):
    """A row for each arm of one length: accuracy where the crowd of m pairs is hidden, as a mean
    with the least and the largest of the seeds. Empty if no run has it."""
    if "hidden, m=0" not in df:
        return pd.DataFrame()
    df = df.dropna(subset=["hidden, m=0"])
    rows = []
    for arm, group in df.groupby("arm", sort=False):
        row = {"arm": arm, "n": len(group)}
        for m in crowds(df["pairs"].iloc[0]):
            found = group[f"hidden, m={m}"]
            row[f"m={m}"] = f"{found.mean():.3f} ({found.min():.3f} to {found.max():.3f})"
        rows.append(row)
    return pd.DataFrame(rows)


CONTRASTS = [
    ("diff_linear norm", "linear"),
    ("diff_linear norm", "linear 2 heads norm"),
    ("diff_linear norm", "diff_linear"),
    ("diff_linear", "linear 2 heads"),
    ("diff_linear norm", "mean norm"),
    ("diff_linear norm", "plus norm"),
    ("diff_linear norm", "signed norm"),
    ("diff_linear norm", "signed 2 heads norm"),
    ("diff_linear norm", "delta 2 heads norm"),
    ("linear norm", "linear"),
]


def contrast_table(df):
    """Differences of mean accuracy with 95 % intervals (Welch's t: the spreads of arms differ)."""
    from scipy import stats

    rows = []
    for first, second in CONTRASTS:
        a = df.loc[df["arm"] == first, "mean accuracy"]
        b = df.loc[df["arm"] == second, "mean accuracy"]
        if min(len(a), len(b)) < 2:
            continue
        low, high = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
        rows.append({
            "difference": f"{first} - {second}",
            "n": f"{len(a)}, {len(b)}",
            "mean accuracy": f"{a.mean() - b.mean():+.3f}",
            "95 % interval": f"{low:+.3f} to {high:+.3f}",
        })
    return pd.DataFrame(rows)


# the first figure is of these runs
PICTURE_PAIRS = 64
PICTURE_STEPS = 2000
PICTURE_RATE = 3e-3  # of the diff_linear whose maps are shown: its best one at this task
# its lines, and what it calls them
SHOWN = {
    "softmax": "softmax",
    "diff_linear norm": "diff_linear",
    "linear 2 heads norm": "linear, same heads,\nstate and norm",
}


@torch.no_grad()
def example_maps(steps):
    """A_1, A_2 and A_1 - lambda A_2 of one head of a trained diff_linear for one text, as one
    tensor, (3, QUERIES, N), and lambda. A quarter of the pairs are the crowd.

    The pairs are sorted: those asked for in the order of the queries, the others, the crowd."""
    torch.set_num_threads(1)
    with torch.enable_grad():
        run = Run("diff_linear norm", PICTURE_RATE, REPORT_SEEDS[0], PICTURE_PAIRS, steps)
        model = train_reader(run)
    generator = torch.Generator().manual_seed(10**6)
    texts = make_texts(generator, 1, PICTURE_PAIRS, PICTURE_PAIRS // 4)
    A = model.branch_maps(model.gpt.blocks[0].norm1(model.embed(texts)))[0]  # (H, QUERIES, T)
    order = texts.place[0].flip(0)  # drawn last are those asked for, drawn first the crowd
    order[:QUERIES] = order[:QUERIES].flip(0)
    A = A[..., order]
    lam = model.lambda_full().item()
    difference = A[0::2] - lam * A[1::2]
    right = difference[:, range(QUERIES), range(QUERIES)].mean(1)
    head = int(right.argmax())  # the head that hears the right pairs best
    return torch.stack((A[2 * head], A[2 * head + 1], difference[head])), lam


def draw_maps(axes, maps, lam):
    """The maps of example_maps below one another."""
    from matplotlib.patches import Rectangle

    N = PICTURE_PAIRS
    m = N // 4
    titles = [
        "$A_1$   (framed: the pair that a query asks for)",
        "$A_2$",
        f"$A_1 - \\lambda A_2$,   $\\lambda$ = {lam:.2f}",
    ]
    limit = maps.abs().max().item()
    for ax, A, title in zip(axes, maps, titles):
        image = ax.imshow(A.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
        ax.set(title=title, xticks=[], yticks=[], ylabel=f"{QUERIES} queries")
        ax.grid(False)
        for q in range(QUERIES):  # the right cell of each query
            ax.add_patch(Rectangle((q - 0.5, q - 0.5), 1, 1, fill=False, linewidth=1.2))
        ax.axvline(N - m - 0.5, color="black", linewidth=1)
    bar = axes[0].figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02)
    bar.ax.set_title("weight", loc="center")
    others = N - m - QUERIES
    crowd = f"{m} pairs with one\nvalue: the crowd"
    labels = [f"{QUERIES}\nasked for", f"{others} other pairs", crowd]
    ax.set_xticks([QUERIES / 2 - 0.5, QUERIES + others / 2 - 0.5, N - m / 2 - 0.5], labels)
    ax.tick_params(length=0)


def draw_picture(maps, lam):
    """The maps alone."""
    figure, axes = report.new_figure(rows=3, size=(9, 5.2))
    draw_maps(axes, maps, lam)
    return figure


def draw_accuracy(ax, df):
    """A line for each arm of SHOWN: accuracy by crowd."""
    sizes = crowds(PICTURE_PAIRS)
    rows = []
    for arm, label in SHOWN.items():
        for _, run in df[df["arm"] == arm].iterrows():
            for m in sizes:
                rows.append({"arm": label, "seed": run["seed"], "m": m, "accuracy": run[f"m={m}"]})
    report.line_plot(ax, pd.DataFrame(rows), "m", "accuracy", by="arm", seed="seed")
    steps = df["steps"].iloc[0]
    ax.set(title=f"Share of right answers after {steps:,} steps\n(thin lines: single seeds)")
    ax.set(xlabel=f"size of the crowd, of {PICTURE_PAIRS} pairs. To the right it is\n"
                  "easier, because fewer values are different")
    ax.set(xticks=sizes, ylim=(0, 1.05))
    report.label_ends(ax)


def draw_crowd(df, maps, lam):
    """The figure that says it all: three maps, and accuracy by crowd."""
    figure, _ = report.new_figure(size=(14, 5.6))
    figure.clear()
    grid = figure.add_gridspec(3, 2, width_ratios=(1.25, 1))
    report.add_title(figure, "Both maps of a diff_linear head see every pair. In their "
                             "difference the pair that is asked for stands out")
    draw_maps([figure.add_subplot(grid[row, 0]) for row in range(3)], maps, lam)
    draw_accuracy(figure.add_subplot(grid[:, 1]), df)
    return figure


def draw_law(ax):
    """Where the crowd wins by lambda, on an untrained layer."""
    doses, _ = law()
    doses = doses[(doses["std of keys"] == 3) & (doses["lambda"] < 1)]
    lam = torch.linspace(0, 0.95, 100)
    alone = doses.iloc[0]["m0 / (1 - lambda)"]
    color = report.STYLE["diff_linear"]["color"]
    ax.plot(lam, alone / (1 - lam), color="#777777")
    ax.plot(doses["lambda"], doses["measured"], "o", markersize=8, color=color)
    ax.text(0.3, 22, f"line: predicted,\n{alone:.1f} / (1 - λ)\ndots: measured", color="#777777",
            ha="center")
    ax.set(title="Not trained: how many pairs of one\nvalue it takes to outvote the right pair")
    ax.set(xlabel="λ", ylabel="pairs in the crowd", yscale="log")
    ax.set(xlim=(-0.05, 1.05), ylim=(1.5, 60))
    ax.set_yticks([2, 5, 10, 20, 50], ["2", "5", "10", "20", "50"])
    ax.minorticks_off()


def draw_dose(ax, df):
    """Accuracy after training by the lambda that was held, a dot for each seed."""
    one_map = df.loc[df["arm"] == "linear 2 heads norm", "mean accuracy"]
    ax.axhline(one_map.mean(), color=report.STYLE["linear"]["color"])
    label = SHOWN["linear 2 heads norm"]
    ax.text(1.05, one_map.mean() - 0.03, label, ha="right", va="top",
            color=report.STYLE["linear"]["color"])
    df = df[df["arm"].isin(DOSES)]
    lam = df["arm"].map({name: arm.frozen_lambda for name, arm in DOSES.items()})
    color = report.STYLE["diff_linear"]["color"]
    ax.plot(lam, df["mean accuracy"], "o", markersize=7, alpha=0.6, color=color)
    ax.plot(df["mean accuracy"].groupby(lam).mean(), color=color, linestyle="--")
    ax.text(0.1, 0.85, "diff_linear\n(dots: seeds, line: mean)", color=color)
    ax.text(-0.02, 0.3, "λ = 0: one map,\nhalf of the features", color=color, va="top")
    ax.set(title="Trained with λ held fixed: share of right\n"
                 "answers, mean over five sizes of the crowd")
    ax.set(xlabel="λ")
    ax.set(xlim=(-0.05, 1.05), ylim=(0, 1.05))


def draw_doses(df):
    """The dose of lambda and its law."""
    figure, (left, right) = report.new_figure(columns=2, size=(11, 4.6))
    draw_law(left)
    draw_dose(right, df)
    doses = df[df["arm"].isin(DOSES)].groupby("arm")["mean accuracy"].mean()
    finding = "The larger λ, the larger a crowd the difference withstands."
    if len(doses):
        best = DOSES[doses.idxmax()].frozen_lambda
        finding += f" Trained, the best mean is at {best:g}"
    report.add_title(figure, finding)
    return figure


def predicted_border(N):
    """The sharpness at which one map is right in half of its answers, as we predicted it."""
    return math.log(1 + N / 16)


def draw_phase(df):
    """Accuracy by length and sharpness, with the border that was predicted for one map."""
    figure, axes = report.new_figure(columns=3, size=(14, 5), sharey=True)
    # without the lengths at which no arm learned anything in so few steps
    best = df.groupby("pairs")["mean accuracy"].max()
    lengths = best.index[best > 0.5].tolist() or best.index.tolist()
    df = df[df["pairs"].isin(lengths)]
    taus = sorted(df["tau"].unique())
    titles = ["softmax, 4 heads", "softmax, 2 heads", "diff, 2 heads of two maps"]
    most = df.groupby(["arm", "tau", "pairs"]).size().max()
    for ax, arm, title in zip(axes, PHASE_ARMS, titles):
        cells = df[df["arm"] == arm].groupby(["tau", "pairs"])["mean accuracy"]
        table = cells.mean().unstack().reindex(index=taus, columns=lengths)
        ax.imshow(table, cmap="viridis", vmin=0, vmax=1, aspect="auto", origin="lower")
        for (tau, N), n in cells.size().items():
            accuracy = table.loc[tau, N]
            few = "" if n == most else f" (n = {n})"
            ax.text(lengths.index(N), taus.index(tau) - 0.15, f"{accuracy:.2f}{few}", ha="center",
                    va="center", color="black" if accuracy > 0.6 else "white")
        half = (table >= 0.5).to_numpy().sum()
        ax.set(title=f"{title}:\n0.5 or more in {half} of {len(cells)} cells")
        ax.set(xlabel="pairs in the text")
        ax.set_xticks(range(len(lengths)), lengths)
        ax.set_yticks(range(len(taus)), [f"{tau:g}" for tau in taus])
        ax.grid(False)
    axes[0].set_ylabel("largest attention logit, τ")
    steps = df["steps"].iloc[0]
    note = f"numbers: share of right answers, mean of {most} seeds"
    if steps == PHASE_STEPS:  # of which the prediction speaks
        note += ". orange: where softmax with 4 heads was predicted to have 0.5"
        for j, N in enumerate(lengths):
            height = np.interp(predicted_border(N), taus, range(len(taus)))
            axes[0].plot([j - 0.5, j + 0.5], [height, height], color="#D55E00", linewidth=4,
                         solid_capstyle="butt")
    figure.supxlabel(note, fontsize=report.LOOK["font.size"])
    report.add_title(figure, f"Share of right answers with logits held below τ, {steps:,} steps")
    return figure


def publish(runs, args):
    """The tables and figures of all finished runs."""
    if not runs.rows:
        raise ValueError(f"no runs in {runs.file}: make some with `train` or `phase`")
    df = one_row_a_run(runs)
    final = reported(runs, df)
    capped = df["tau"].notna()
    about = report.conditions(torch.device("cpu"), threads_of_a_run=1)
    if not capped.all():
        publish_trained(final[final["tau"].isna()], df[~capped], about, args)
    if capped.any():
        publish_capped(final[final["tau"].notna()], df[capped], about, args)


def publish_trained(final, every_run, about, args):
    """The first figure, the dose, and the tables of all arms and of the law."""
    steps = args.steps or PICTURE_STEPS
    shown = final[(final["pairs"] == PICTURE_PAIRS) & (final["steps"] == steps)]
    if not shown["arm"].isin(SHOWN).any():
        raise ValueError("nothing to show yet: `python -m experiments.crowd train --groups=64`")
    tables = {}
    for (N, steps_of_group), group in final.groupby(["pairs", "steps"]):
        title = f"{N} pairs, {steps_of_group:,} steps"
        tables[f"{title}: accuracy by crowd"] = accuracy_table(group)
        hidden = hidden_table(group)
        if len(hidden):
            tables[f"{title}: accuracy with the crowd hidden"] = hidden
        differences = contrast_table(group)
        if len(differences):
            tables[f"{title}: differences"] = differences
    doses, caps = law()
    tables["The law, untrained, 64 pairs: the crowd that makes half of the answers wrong"] = doses
    tables["The same for softmax with its largest logit held to tau"] = caps
    draw_doses(shown).savefig(args.out / "dose.png")
    figure = draw_crowd(shown, *example_maps(steps))
    report.publish(args.out, "crowd", about, tables, figure, every_run)


def publish_capped(final, every_run, about, args):
    """The phase diagram and its tables."""
    drawn = final[final["steps"] == (args.steps or PHASE_STEPS)]
    if drawn.empty:
        raise ValueError("no capped runs of so many steps: give their number with --steps")
    tables = {}
    for (N, steps), group in final.groupby(["pairs", "steps"]):
        table = phase_table(group.sort_values(["tau", "arm"]))
        tables[f"{N} pairs, {steps:,} steps: accuracy by crowd"] = table
    report.publish(args.out, "phase", about, tables, draw_phase(drawn), every_run)


def phase_table(df):
    """A row for each arm and sharpness of one length: accuracy by crowd, mean over the seeds."""
    sizes = [f"m={m}" for m in crowds(df["pairs"].iloc[0])]
    by = df.groupby(["tau", "arm"], sort=False)
    table = by[[*sizes, "mean accuracy", "lambda"]].mean().round(3)
    table.insert(0, "n", by.size())
    table.insert(1, "lr", by["lr"].first())
    return table.reset_index()


def main(argv=None):
    p = argparse.ArgumentParser(
        "crowd", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("verb", choices=["maps", "law", "train", "phase", "figure"])
    p.add_argument("--out", type=Path, default="out/crowd", help="its folder (%(default)s)")
    p.add_argument("--procs", type=positive_int, default=2, help="runs at once (%(default)s)")
    p.add_argument("--steps", type=positive_int,
                   help="steps of a run, and of the runs that `maps` and `figure` draw (2,000 with "
                        "64 pairs, else 1,500 in most groups)")
    seeds = comma_list(int_from_0)
    p.add_argument("--seed", type=seeds, default=REPORT_SEEDS,
                   help="seeds that are reported (3,4,5,6,7)")
    p.add_argument("--choose_on", type=seeds, default=CHOOSE_SEEDS,
                   help="seeds on which rates are chosen (1,2)")
    p.add_argument("--groups", default=",".join(GROUPS),
                   help="of train: groups of arms (%(default)s)")
    p.add_argument("--pairs", type=comma_list(positive_int), default=PHASE_PAIRS,
                   help="of phase: how many pairs, a list (32,64,128)")
    p.add_argument("--tau", type=comma_list(positive_number), default=PHASE_TAU,
                   help="of phase: largest logits, a list (0.5,1,1.5,2,3,5)")
    args = p.parse_args(argv)
    if not set(args.choose_on) <= set(CHOOSE_SEEDS) or set(args.seed) & set(CHOOSE_SEEDS):
        raise ValueError("--choose_on takes 1 and 2, and --seed other numbers: a run that chose "
                         "a rate is not reported")
    report.check_can_publish(args.out)
    if args.verb == "maps":
        picture = args.out / "maps.png"
        draw_picture(*example_maps(args.steps or PICTURE_STEPS)).savefig(picture)
        print(f"-> {picture}")
        return
    runs = Runs(args.out, args.procs)
    if args.verb == "law":
        for table in law():
            print(f"\n{report.to_markdown(table)}")
    if args.verb == "train":
        train(runs, args)
    if args.verb == "phase":
        phase(runs, args)
    if args.verb == "figure":
        publish(runs, args)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("crowd: stopped. The same command goes on after the last finished run")
    except (ValueError, OSError, ImportError) as e:
        sys.exit(f"crowd: {e}")
