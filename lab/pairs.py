"""
The look-up: texts of pairs, a small model that reads them, and what crowds do to it.

A text is 64 pairs and then 8 queries. A pair is one token: the embedding of its key plus
that of its value. A query is a key's embedding plus one that says "query", and the answer is the
value of that key. There are no positions. A crowd is a number of pairs that share a value. The
queries ask for other pairs, and all of those have different values.

The model is one block of model.py, whose logits have a cap: none is larger than tau. It trains on
plain texts, whose values are all different, and is tested beside crowds, which teach it nothing.

The prediction. If a map gives the weight c to every wrong pair and r to the right one, a crowd of m
has m c, and outvotes the right one from m = r / c on. With wrong logits around 0 that is e^tau. A
minus that takes u from every pair moves this border to (r - u) / (c - u). If u is c, none outvotes.
"""
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

from check_arm import check_arm
from lab.arms import DiffNoNorm, Norm
from model import ATTENTION, GPT, Diff, GPTConfig

QUERIES = 8
RIGHT = 64 - QUERIES  # the pair that the first query asks for. A crowd is in those before it
STEPS = 1500
SIZES = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48)  # of the crowds of a test
MORE_PAIRS = (256, 1024)  # pairs that are added in a test of longer texts


@dataclass(frozen=True)
class Run:
    """The settings of one trained model."""

    arm: str
    lr: float = 3e-3
    seed: int = 3
    tau: float | None = 2.0  # the largest logit. None: no cap
    heads: int = 1  # of values. A differential arm has two maps for each of them
    norm: bool = True  # an output norm
    train_pairs: int | list = 64  # or [least, most]: drawn anew for each step
    keys: int = 256  # different keys
    values: int = 128  # different values


class Texts(NamedTuple):
    """B texts of N pairs, as they were drawn: first the crowd, last those that are asked for."""

    key: torch.Tensor  # (B, N), from 0
    value: torch.Tensor  # (B, N), from 0
    rank: torch.Tensor  # (B, N), random numbers, whose order the pairs have in the text

    def answer(self):
        """(B, QUERIES)"""
        return self.value[:, -QUERIES:]

    def order(self):
        """Which pair stands at each place of the text, (B, N)."""
        return self.rank.argsort(-1)

    def place(self):
        """At which place each pair stands, (B, N)."""
        return self.order().argsort(-1)


def make_texts(seed, B, N=64, m=0, more=0, crowds=1, keys=256, values=128):
    """B texts of N pairs: m in a crowd, and the others with different values.

    seed: a number, or a generator. more: pairs that are added, in `crowds` crowds. Their keys are
    drawn, with repetition, from those that are left.
    """
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    key = torch.rand(B, keys, generator=generator).argsort(-1)  # all of them, shuffled
    shuffled = torch.rand(B, values, generator=generator)
    value = shuffled.topk(2 * N, largest=False).indices  # argsort breaks ties in another way
    free = torch.randint(N, keys, (B, more), generator=generator)
    added = N + torch.arange(more) % crowds  # which of the values each of them has
    return Texts(
        key=torch.cat((key.gather(1, free), key[:, :N]), dim=1),
        value=torch.cat((value[:, added], value[:, :1].expand(B, m), value[:, m:N]), dim=1),
        rank=torch.rand(B, more + N, generator=generator),
    )


def shown_texts(m):
    """The 128 texts of the pictures and the page: the same for every m, but that m pairs agree."""
    return make_texts(4 * 10**6, 128, m=m)


# ---- the model


def capped(arm, tau):
    """A subclass of this class of attention, in which no logit is larger than tau."""

    class Capped(arm):
        def project(self, x):
            """All queries have one length, and so have all keys."""
            q, k, v = super().project(x)
            q = tau * math.sqrt(self.d) * F.normalize(q, dim=-1)
            return q, F.normalize(k, dim=-1), v

    return Capped


def held(arm, number):
    """A subclass of this class of attention, whose lambda is this number."""

    class Held(arm):
        def lam(self, x):
            return number

    return Held


def attention_of(run):
    """The class of attention of a run, with an output norm or without, and with its cap."""
    arm = ATTENTION[run.arm]
    if run.norm and not issubclass(arm, Diff):  # which has one by itself
        arm = type("WithNorm", (arm, Norm), {})
    if not run.norm and arm is Diff:
        arm = DiffNoNorm
    return arm if run.tau is None else capped(arm, run.tau)


class Reader(GPT):
    """One block that reads texts of pairs. held_lambda: a number that takes the place of lambda.

    It takes its parts and their start from GPT. load and generate are not for it.
    """

    def __init__(self, run, held_lambda=None):
        config = GPTConfig(
            attn=run.arm, n_layer=1, n_embd=64, rope_theta=0,
            n_head=run.heads * ATTENTION[run.arm].value_width,
            vocab_size=run.keys + run.values + 1,  # and the mark of a query
        )
        super().__init__(config, seed=None)
        self.run = run
        arm = attention_of(run)
        if held_lambda is not None:
            arm = held(arm, held_lambda)
        self.blocks[0].attn = arm(config, depth=0)
        self.draw_parameters(run.seed)

    def read_as(self, arm, lam):
        """A Reader with these weights, as another arm, or the same one, whose lambda is lam."""
        found = Reader(replace(self.run, arm=arm), held_lambda=lam)
        found.load_state_dict(self.state_dict(), strict=False)  # an average has a lambda of its own
        return found.eval()

    def tokens(self, texts):
        """The embedded texts, (B, T, C): a token for each pair, and one for each query."""
        order = texts.order()
        key = torch.cat((texts.key.gather(1, order), texts.key[:, -QUERIES:]), dim=1)
        value = F.pad(texts.value.gather(1, order), (0, QUERIES), value=self.run.values)  # the mark
        return self.wte(key) + self.wte(self.run.keys + value)  # rows behind those of the keys

    def forward(self, texts):
        """The logits of the values at the queries, (B, QUERIES, values)."""
        block = self.blocks[0]
        x = self.tokens(texts)
        y = (x + block.attn(block.norm1(x)))[:, -QUERIES:]
        y = y + block.mlp(block.norm2(y))
        # the embedding is also the output layer, as in the GPT, but only values can be answers
        values = self.wte.weight[self.run.keys :][: self.run.values]
        return self.norm(y) @ values.T

    @torch.no_grad()
    def weights(self, texts):
        """What a query takes from each pair, (B, h, QUERIES, N), in the order of drawing."""
        A = self.blocks[0].attn.map(self.blocks[0].norm1(self.tokens(texts)))[:, :, -QUERIES:]
        return A.gather(-1, texts.place()[:, None, None].expand(*A.shape[:3], -1))

    @torch.no_grad()
    def own_lambda(self):
        """The mean lambda of the queries. 0 if nothing is subtracted."""
        attn = self.blocks[0].attn
        if not hasattr(attn, "lam"):
            return 0.0
        x = self.blocks[0].norm1(self.tokens(shown_texts(0)))[:, -QUERIES:]
        return round(torch.as_tensor(attn.lam(x)).float().mean().item(), 4)


def train(run, steps=STEPS):
    """A trained Reader. Every step has new texts, the same for all arms."""
    torch.set_num_threads(1)  # a model this small has nothing to share
    reader = Reader(run)
    check_arm(reader.config)
    optimizer = torch.optim.AdamW(reader.parameters(), lr=run.lr, betas=(0.9, 0.95), weight_decay=0)
    generator = torch.Generator().manual_seed(run.seed)
    for step in tqdm(range(steps), run.arm, mininterval=1):
        rate = run.lr * min(1, (step + 1) / 50) * (1 - step / steps)
        optimizer.param_groups[0]["lr"] = rate
        N = run.train_pairs
        if isinstance(N, list):
            N = int(torch.randint(N[0], N[1] + 1, (), generator=generator))
        texts = make_texts(generator, 32, N, keys=run.keys, values=run.values)
        loss = F.cross_entropy(reader(texts).flatten(0, 1), texts.answer().flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
    return reader.eval()


@torch.no_grad()
def score(reader, texts, crowd=0):
    """[% of the answers that are right, % that name a value of the first `crowd` pairs]"""
    found = []
    for part in map(Texts._make, zip(*(x.split(32) for x in texts))):  # all would need gigabytes
        said = reader(part).argmax(-1)  # (B, QUERIES)
        names_crowd = (said[..., None] == part.value[:, None, :crowd]).any(-1)
        found.append(torch.stack((said == part.answer(), names_crowd)))
    return [round(100 * x, 2) for x in torch.cat(found, dim=1).float().mean((1, 2)).tolist()]


def measure(reader):
    """The results of a run: lambda, and those of each test with its own lambda and with 1.

    A test is a crowd of "16" of the 64 pairs, or "+256" pairs more that agree.
    """
    sizes = dict(keys=reader.run.keys, values=reader.run.values)
    tests = {str(m): (make_texts(10**6 + m, 512, m=m, **sizes), m) for m in SIZES}
    for more in MORE_PAIRS:
        for name, crowds in ("", 1), (" in 16 crowds", 16):
            texts = make_texts(2 * 10**6 + more, 256, more=more, crowds=crowds, **sizes)
            tests[f"+{more}{name}"] = (texts, more)
    found = {"lambda": reader.own_lambda()}
    found["own"] = {name: score(reader, *of_test) for name, of_test in tests.items()}
    arm = reader.run.arm
    if arm != "softmax_sum":  # which has no minus
        at_one = reader.read_as("softmax_average" if arm == "softmax" else arm, lam=1.0)
        found["1"] = {name: score(at_one, *of_test) for name, of_test in tests.items()}
    return found
