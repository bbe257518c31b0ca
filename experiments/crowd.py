"""
When does the difference of two attention maps help? A task of seconds that answers it, with a law.

    python -m experiments.crowd law       # the law on an untrained layer: seconds
    python -m experiments.crowd train     # every arm on the task: about an hour on two cores
    python -m experiments.crowd phase     # capped softmax, accuracy by sharpness and length: about an hour
    python -m experiments.crowd figure    # tables and figures of all runs that are there

`train` and `phase` append one JSON line for each finished run to <out>/runs.jsonl. A run that is
in the file is not trained again, so they can be stopped anywhere and go on with the same command.

The task. A text is N pairs and then 8 queries. A pair is one token: the embedding of its key plus
that of its value. A query is a key's embedding plus one that says "query", and its value must come.
m of the pairs, the crowd, share one value. The queries ask for pairs outside the crowd, whose values
all differ. There are 4 N keys and 2 N values. The model is one block of model.py without positions:
64 channels, 4 heads, or 2 heads of two branches in the differential arms. Each training step takes
32 new texts of the same m, drawn evenly from 0 to 3 N / 4.

The law. Let a map put the weight c on every wrong pair and c + D on the right one. Then the crowd
gets m c and the answer c + D: one positive map counts votes and fails at m0 = 1 + D / c. Each branch
of a differential head is divided by its own sum, so A_1 - lambda A_2 has (1 - lambda) c in the place
of c: it fails at m0 / (1 - lambda). A softmax map whose largest logit is tau fails at e^tau.

What we predicted, written and committed before the first run, and what came:

1.  The law, N = 64, untrained: the crowd at which half of the answers are wrong is 2.2 without a
    difference and within a third of 2.2 / (1 - lambda) for lambda = 0.25, 0.5, 0.75, 0.9; for
    lambda = 1 it is never reached. Softmax capped at tau = 1, 2, 3: within a third of e^tau = 2.7,
    7.4, 20; minus the uniform map: never.
2.  Trained, N = 32, accuracy at m = 0, 8, 24: softmax and diff 0.99 or more at every m.
3.  linear 0.88 to 0.96. With two heads (the heads and the state of diff_linear) 0.75 to 0.88 at
    m = 0 and lower at m = 24. With one head, which can't subtract one head from another behind
    the values, below 0.6 at m = 24.
4.  diff_linear 0.99 or more with the norm and 0.97 or more without it. lambda rises from 0.2 to
    above 0.8 in every seed.
5.  A plus in the place of the minus, with a lambda of free sign: lambda ends below -0.7, and
    the accuracy is that of diff_linear, within 0.03. A plus that must stay one,
    (A_1 + |lambda| A_2) / (1 + |lambda|): no better than linear with two heads, within 0.03.
6.  lambda held at 0, 0.25, 0.5, 0.75, 0.9: accuracy rises at every step (with the norm, m = 0) from
    that of linear with two heads, within 0.05, to 0.97 or more. 1.0 is not below 0.75.
7.  The norm changes linear's accuracy by less than 0.05: it doesn't subtract.
8.  Signed features without a difference (no phi, no row sums, a norm): 0.95 or more with four heads,
    0.98 or more with two. So what counts is the sign, not that there are two maps.
9.  The delta rule, keys of length one: 0.9 or more with four heads, 0.97 or more with two.
10. Decay doesn't help against a crowd: linear with decay is more than 0.1 below linear, diff_linear
    with decay is below diff_linear.
11. N = 64: linear below 0.8 at m = 0 and below 0.5 at the largest crowd, diff_linear above 0.9.
12. Capped softmax with a norm: one map is right in half of its answers (mean over the crowds) at
    e^tau = 1 + N / 16, that is at tau = 1.1, 1.6, 2.2, 2.8, 3.5 for N = 32, 64, 128, 256, 512. (The
    line is drawn through two points of a prototype, N = 32 and 128; the others are unseen.) The
    difference is at 0.95 or more for tau >= 1 up to N = 128. Its border depends on N and hardly on
    tau: where it is right at tau = 2, it is right at tau = 0.5 too.
"""
import argparse
import json
import math
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import GPT, GPTConfig, distances, log_mask, phi

QUERIES = 8
CHANNELS = 64
BATCH = 32
WARMUP = 50
TEST_TEXTS = 512  # texts of each crowd in a test
RATES = (1e-3, 3e-3, 1e-2)
LADDER = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # where the best rate is looked for, if it is at RATES' edge
CHOOSE_SEEDS = (1, 2)  # the rate of an arm is chosen on these
REPORT_SEEDS = (3, 4, 5, 6, 7)  # and what is reported comes from these


@dataclass(frozen=True)
class Arm:
    """How an attention differs from the others. The first five fields are GPTConfig's."""
    attn: str
    n_head: int = 4  # a differential arm has half as many heads, of two branches each
    subln: bool = False
    decay: bool = False
    weights: str = ""  # "signed" or "delta": see Reader.one_map
    combine: str = "minus"  # how the branches become one map: see Reader.join
    frozen_lambda: float | None = None  # None: lambda is learned, from 0.2


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
    "diff": Arm("diff"),
    "mean": Arm("diff_linear", combine="mean"),
    "plus": Arm("diff_linear", combine="plus"),
    "linear 1 head": Arm("linear", n_head=1),
    "delta": Arm("linear", weights="delta"),
    **{f"lambda={dose}": Arm("diff_linear", frozen_lambda=dose) for dose in DOSE},
}
ARMS = CORE | DOSES | CONTROLS | MORE
LONG = (
    "linear", "linear 2 heads", "diff_linear norm", "signed 2 heads norm", "delta 2 heads norm", "softmax")


@dataclass(frozen=True)
class Group:
    """Arms that are trained on the same task, and in this order."""
    arms: tuple
    pairs: int = 32
    steps: int = 1500


GROUPS = {
    "core": Group(tuple(CORE)),
    "dose": Group(tuple(DOSES)),
    "controls": Group(tuple(CONTROLS)),
    "64": Group(LONG, pairs=64, steps=2000),
    "more": Group(tuple(MORE)),
    "128": Group(LONG, pairs=128, steps=2000),
}
# the phase diagram: a softmax map and a difference of two, both with the norm
PHASE_ARMS = ("softmax norm", "diff norm")
PHASE_PAIRS = (32, 64, 128, 256, 512)
PHASE_STEPS = 1500
PHASE_CHOOSE_TAU = 1.5
PHASE_TAU = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)


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
    """B texts of N pairs and QUERIES queries. Pair i of a text is the i-th that was drawn: the first m
    are the crowd, the last QUERIES are asked for. Where it stands in the text is place[:, i]."""
    key: torch.Tensor  # (B, N + QUERIES), numbers of keys
    other: torch.Tensor  # (B, N + QUERIES), a number above the keys': the value, or the mark of a query
    answer: torch.Tensor  # (B, QUERIES), which value is right, from 0
    place: torch.Tensor  # (B, N)


def make_texts(generator, B, N, m):
    """B texts of N pairs, m of them in the crowd."""
    keys, values = 4 * N, 2 * N
    key = torch.rand(B, keys, generator=generator).argsort(-1)[:, :N]
    value = torch.rand(B, values, generator=generator).argsort(-1)[:, :N]
    value[:, :m] = value[:, :1]
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
    """The delta rule as a map. Each token writes what the state lacks: with q and k of length one,
    u_t = beta_t (v_t - S_t-1 k_t),  S_t = S_t-1 + u_t k_t^T,  y_t = S_t q_t.
    So (1 + L) U = beta V with L_ts = beta_t k_t k_s below the diagonal, and A = (q k) (1 + L)^-1 beta."""
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
            attn=arm.attn, n_layer=1, n_head=arm.n_head, n_embd=CHANNELS, subln=arm.subln, decay=arm.decay,
            block_size=N + QUERIES, vocab_size=6 * N + 1, rope_theta=0)
        self.gpt = GPT(config, run.seed)
        self.layer = self.gpt.blocks[0].attn
        if arm.weights == "delta":
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

    def one_map(self, q, k, x):
        """The map of each branch, (B, H, QUERIES, T)."""
        if self.arm.weights == "signed":
            return signed_map(q, k, self.mask)
        if self.arm.weights == "delta":
            beta = torch.sigmoid(self.beta(x)).transpose(1, 2)  # (B, H, T)
            return delta_map(q, k, self.mask, beta)
        if self.arm.attn in ("linear", "diff_linear"):
            return linear_map(q, k, self.mask)
        return softmax_map(q, k, self.mask, self.tau)

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

    def branch_maps(self, x):
        """The map of each branch, from the normalised input of the layer."""
        layer = self.layer
        B, T, C = x.shape
        q = layer.q_proj(x[:, self.pairs :]).view(B, QUERIES, layer.n_head, -1).transpose(1, 2)
        k = layer.k_proj(x).view(B, T, layer.n_head, -1).transpose(1, 2)
        return self.one_map(q, k, x)

    def embed(self, texts):
        return self.gpt.wte(texts.key) + self.gpt.wte(texts.other)

    def forward(self, texts):
        """The logits of the values at the queries, (B, QUERIES, 2 N)."""
        layer = self.layer
        block = self.gpt.blocks[0]
        x = self.embed(texts)
        B, T, C = x.shape
        normed = block.norm1(x)
        v = layer.v_proj(normed).view(B, T, layer.n_value_head, -1).transpose(1, 2)
        y = self.join(self.branch_maps(normed)) @ v
        if layer.subln is not None:
            y = layer.subln(y) * layer.subln_scale
        y = y.transpose(1, 2).reshape(B, QUERIES, C)
        x = x[:, self.pairs :] + layer.out_proj(y)
        x = x + block.mlp(block.norm2(x))
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


@torch.no_grad()
def test_reader(model):
    """Accuracy by crowd, the mean loss over the crowds, lambda, and where the attention goes."""
    accuracy = {}
    losses = []
    for m in crowds(model.pairs):
        # the same texts for every model, which no model was trained on
        texts = make_texts(torch.Generator().manual_seed(10**6 + m), TEST_TEXTS, model.pairs, m)
        logits = model(texts)
        losses.append(F.cross_entropy(logits.flatten(0, 1), texts.answer.flatten()).item())
        accuracy[str(m)] = (logits.argmax(-1) == texts.answer).float().mean().item()
        if m == model.pairs // 4:
            attention = attention_on(model, texts)
    return {
        "accuracy": accuracy,
        "mean accuracy": sum(accuracy.values()) / len(accuracy),
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
        self.rows = {}
        out.mkdir(parents=True, exist_ok=True)
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        for line in lines:
            self.keep(json.loads(line))

    def keep(self, row):
        names = Run.__dataclass_fields__
        self.rows[Run(**{name: row[name] for name in names})] = row

    def finish(self, runs):
        """Trains those of `runs` that are not in the file, and writes each when it has ended.
        False: there were none."""
        missing = [run for run in dict.fromkeys(runs) if run not in self.rows]
        if not missing:
            return False
        with ProcessPoolExecutor(self.procs, multiprocessing.get_context("spawn")) as pool:
            jobs = [pool.submit(do_run, run) for run in missing]
            for number, job in enumerate(as_completed(jobs), 1):
                row = job.result()
                with self.file.open("a") as f:
                    f.write(json.dumps(row) + "\n")
                self.keep(row)
                print(f"{number}/{len(missing)} {row['arm']}, N = {row['pairs']}, tau {row['tau']}, "
                      f"lr {row['lr']:g}, seed {row['seed']}: accuracy {row['mean accuracy']:.3f}, "
                      f"loss {row['loss']:.3f}, {row['seconds']} s", flush=True)
        return True

    def best_rate(self, like):
        """The rate with the least loss on CHOOSE_SEEDS, of the runs that differ from `like` in rate and seed."""
        losses = {}
        for run, row in self.rows.items():
            if run.seed in CHOOSE_SEEDS and replace(run, lr=like.lr, seed=like.seed) == like:
                losses.setdefault(run.lr, []).append(row["loss"])
        return min(losses, key=lambda lr: sum(losses[lr]) / len(losses[lr]))


def train_group(runs, likes, seeds):
    """Chooses a rate for each of `likes` on CHOOSE_SEEDS, and trains it on `seeds`."""
    wanted = {like: RATES for like in likes}
    while runs.finish([replace(like, lr=lr, seed=seed)
                       for like in likes for lr in wanted[like] for seed in CHOOSE_SEEDS]):
        for like in likes:
            # a best rate at the edge of what was tried is not known to be the best
            best = LADDER.index(runs.best_rate(like))
            wanted[like] = LADDER[max(0, best - 1) : best + 2]
    runs.finish([replace(like, lr=runs.best_rate(like), seed=seed) for like in likes for seed in seeds])


def train(runs, args):
    for name in args.groups:
        group = GROUPS[name]
        likes = [Run(arm, 0, 0, group.pairs, args.steps or group.steps) for arm in group.arms]
        train_group(runs, likes, args.seed)


def phase(runs, args):
    """Capped softmax, one map and the difference, over length and sharpness.

    The rate of an arm at a length is the best of RATES at one sharpness, on one seed. Beyond
    128 pairs, where a run takes minutes, it is that of 128 pairs."""
    steps = args.steps or PHASE_STEPS
    for N in args.pairs:
        likes = [Run(arm, 0, 0, min(N, 128), steps, PHASE_CHOOSE_TAU) for arm in PHASE_ARMS]
        runs.finish([replace(like, lr=lr, seed=CHOOSE_SEEDS[0]) for like in likes for lr in RATES])
        rates = {like.arm: runs.best_rate(like) for like in likes}
        runs.finish([Run(arm, rates[arm], seed, N, steps, tau)
                     for seed in args.seed for tau in PHASE_TAU for arm in PHASE_ARMS])


def main(argv=None):
    p = argparse.ArgumentParser(
        "crowd", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("verb", choices=["law", "train", "phase", "figure"])
    p.add_argument("--out", type=Path, default="out/crowd", help="folder of what is written (%(default)s)")
    p.add_argument("--procs", type=int, default=2, help="runs at once (%(default)s)")
    p.add_argument("--steps", type=int, help="training steps of a run (1,500; 2,000 from 64 pairs on)")
    p.add_argument("--seed", type=int_list, default=REPORT_SEEDS, help="seeds to report (3,4,5,6,7)")
    p.add_argument("--groups", type=str_list, default=list(GROUPS), help="of train: %(default)s")
    p.add_argument("--pairs", type=int_list, default=PHASE_PAIRS, help="of phase: %(default)s")
    args = p.parse_args(argv)
    runs = Runs(args.out, args.procs)
    if args.verb == "train":
        train(runs, args)
    if args.verb == "phase":
        phase(runs, args)


def int_list(text):
    return [int(part) for part in text.split(",")]


def str_list(text):
    return text.split(",")


if __name__ == "__main__":
    main()
