"""
Four attentions in one GPT.

                one map     the difference of two maps
    softmax     softmax     diff            (Differential Transformer, 2410.05258: "the paper")
    linear      linear      diff_linear     (linear: Transformers are RNNs, 2006.16236)

Attention multiplies the values V by a causal T x T matrix A, which we call the map: row i says how
much token i takes from each token j <= i. Every map here is made in the same way,

    A_ij = w_ij D_ij / z_i          z_i = sum over j of w_ij D_ij

    w    the weights: exp(q_i . k_j / sqrt(d)) for softmax, phi(q_i) . phi(k_j) for linear attention
    D    the mask: 1 for j <= i, and 0 for the future. With `decay` it is gamma^(i - j) for j <= i,
         so that a head forgets
    z    the sums of the rows

and a differential arm has the difference of two such maps, A = A_1 - lambda A_2, with a learned
lambda.

Each attention is written three times. A test holds the three forms together.

    the map     A itself, O(T^2), a few lines that read like the equation: to look at, and to test
    the fast    A V without A: fused kernels for softmax, chunks of tokens for linear. To train
    the step    one token at a time from a state: the keys and values of all tokens so far for
                softmax, one matrix of fixed size for linear. To sample

The letters in the comments on shapes:

    B batch, T time (tokens), C channels (n_embd), H heads of queries and keys (n_head), d = C/H
    h heads of values, d_v their size

In the differential arms the heads 2n and 2n+1 of the queries and keys are the two branches of head
n. They share one value of size 2d, so h = H/2 and d_v = 2d. In the other two arms h = H and d_v = d.
So a differential model has the projections of a softmax model with H heads: we halve the count of
the heads, never their size d.
"""
import hashlib
import math
import os
import zipfile
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

NORM_EPS = 1e-5  # of every RMSNorm
ROW_SUM_EPS = 1e-12  # keeps the sum of a linear row from being exactly zero
CHUNK = 64  # tokens in a chunk of linear attention's fast form


@dataclass
class GPTConfig:
    """All that describes a model. Raises ValueError for one that can't be built."""

    attn: str = "softmax"  # a name in ATTENTION
    # the tokens of a training sequence, the room in softmax's cache, and half the longest span of
    # decay: with decay, another block_size is another function
    block_size: int = 1024
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12  # of the softmax model. A differential model has half as many, twice as wide
    n_embd: int = 768
    mlp_width: int | None = None  # None: 8/3 n_embd, rounded down to a multiple of 8
    rope_theta: float = 10000.0  # base of the rotary embedding's angles. 0: no positions at all
    flash: bool = True  # compute the fast form. False: the map
    decay: bool = False  # heads forget, see Attention.decay_rate
    subln: bool | None = None  # RMSNorm on each head's output. None: in the differential arms only
    subln_init: float = 1.0  # where the weight of that norm starts
    lambda_init: float | None = None  # of the differential arms. None: the paper's formula

    def __post_init__(self):
        if self.attn not in ATTENTION:
            raise ValueError(f"attn must be one of {', '.join(ATTENTION)}, not {self.attn!r}")
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.n_head % ATTENTION[self.attn].branches != 0:
            raise ValueError(f"n_head must be even for {self.attn}, not {self.n_head}")
        # a head needs an even size: the rotary embedding turns pairs of channels
        if self.n_embd % (2 * self.n_head) != 0:
            raise ValueError(f"n_embd must be a multiple of {2 * self.n_head}, not {self.n_embd}")


def wide_dtype(x):
    """float32 for bf16 and fp16, else x's own dtype."""
    return torch.promote_types(x.dtype, torch.float32)


def upcast(x):
    """x in its wide dtype, for what bf16 would round away: sums, norms, differences."""
    return x.to(wide_dtype(x))


class Rope(NamedTuple):
    """The positions of tokens, (T,) int64, and the cosines and sines of their angles, (T, d/2)."""

    position: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def rotary_table(position, config, dtype):
    """The Rope of positions m: the angles are m theta^(-2i/d) (RoFormer, arXiv 2104.09864)."""
    d = config.n_embd // config.n_head
    # in float64, so that position 10 million is turned as exactly as position 10. Apple's GPUs
    # have no float64, so for them we compute on the CPU (untested: we have no Mac)
    device = "cpu" if position.device.type == "mps" else position.device
    i = torch.arange(d // 2, device=device, dtype=torch.float64)
    frequency = config.rope_theta ** (-2 * i / d) if config.rope_theta else torch.zeros_like(i)
    angle = position.to(device)[:, None] * frequency  # (T, d/2)
    # stacked, so that they are one table: else torch.compile computes a cosine wherever it is used
    table = torch.stack((angle.cos(), angle.sin())).to(dtype).to(position.device)
    cos, sin = table.unbind()
    return Rope(position, cos, sin)


def rotate(x, rope):
    """Turn each pair of neighbouring channels of x (B, H, T, d) by its angle (RoFormer, Eq. 34)."""
    x_even, x_odd = upcast(x).unflatten(-1, (-1, 2)).unbind(-1)  # (B, H, T, d/2) each
    even = x_even * rope.cos - x_odd * rope.sin
    odd = x_even * rope.sin + x_odd * rope.cos
    return torch.stack((even, odd), dim=-1).flatten(-2).to(x.dtype)


def distances(T, device):
    """i - j for all pairs of T tokens, (T, T): below 0 in the future."""
    i = torch.arange(T, device=device)
    return i[:, None] - i


def log_mask(rate, distance):
    """log D: -rate * distance for the past, -inf for the future (distance < 0).

    rate is -log gamma of each head, (H, 1, 1), and distance is (rows, columns). Returns (H, rows,
    columns). It is never above 0, so that no power of gamma overflows.
    """
    return (-rate * distance).masked_fill(distance < 0, -math.inf)


class Attention(nn.Module):
    """What the four attentions share: projections, lambda, the difference, the norm.

    layer(x) takes (B, T, C) to (B, T, C), and layer.map(x) is its map, (B, h, T, T). Look at maps
    in float32: bf16 rounds large scores. The parameters have the names of Microsoft's release.
    """

    branches = 1  # maps per head

    def __init__(self, config, depth):
        super().__init__()
        C = config.n_embd
        self.config = config
        self.n_head = config.n_head
        self.n_value_head = config.n_head // self.branches
        self.head_dim = C // config.n_head
        self.flash = config.flash
        self.kernel = "sdpa"  # what computes softmax's fast form, see pick_kernel
        # a function of the scores, (B, H, T, T). The map form uses what it returns in their place
        self.score_hook = None

        self.q_proj = nn.Linear(C, C, bias=False)
        self.k_proj = nn.Linear(C, C, bias=False)
        self.v_proj = nn.Linear(C, C, bias=False)
        self.out_proj = nn.Linear(C, C, bias=False)
        self.out_proj.weight.init_std = residual_std(C, config)

        self.subln = None
        self.subln_scale = 1.0
        if config.subln or (config.subln is None and self.branches == 2):
            # one weight for all heads
            self.subln = nn.RMSNorm(C // self.n_value_head, eps=NORM_EPS)
            self.subln.weight.init_value = config.subln_init
        if self.branches == 2:
            self.make_lambda(depth)

    def make_lambda(self, depth):
        """The four vectors of Eq. 2. depth is the paper's l - 1: its layers are counted from 1."""
        self.lambda_init = self.config.lambda_init
        if self.lambda_init is None:
            self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.subln_scale = 1 - self.lambda_init  # Eq. 3. Without the norm this factor goes, too
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            vector = nn.Parameter(torch.empty(self.head_dim))
            vector.init_std = 0.1
            setattr(self, name, vector)

    def lambda_full(self):
        """lambda of Eq. 2, one number for all heads of the layer."""
        # (a * b).sum() and not a @ b: autocast would compute the dot product in bf16
        dot_1 = (upcast(self.lambda_q1) * upcast(self.lambda_k1)).sum()
        dot_2 = (upcast(self.lambda_q2) * upcast(self.lambda_k2)).sum()
        return torch.exp(dot_1) - torch.exp(dot_2) + self.lambda_init

    def subtract(self, y, lam):
        """Branch 1 minus lambda times branch 2, of maps or outputs: (B, H, ...) to (B, h, ...)."""
        if self.branches == 1:
            return y
        y = upcast(y)  # a difference of two nearly equal numbers
        return y[:, 0::2] - lam * y[:, 1::2]

    def decay_rate(self, device, dtype):
        """-log gamma = 1/span of each head of the queries, (H, 1, 1). 0 without decay.

        The spans of the h heads are evenly spaced in log, from 4 tokens to two blocks. A single
        head gets the middle of that range. Both branches of a head forget alike: fold_q needs that.
        """
        if not self.config.decay:
            return torch.zeros(self.n_head, 1, 1, device=device, dtype=dtype)
        shortest = math.log2(4)
        longest = math.log2(2 * self.config.block_size)
        if self.n_value_head == 1:
            shortest = longest = (shortest + longest) / 2
        log_span = torch.linspace(shortest, longest, self.n_value_head, device=device, dtype=dtype)
        return torch.exp2(-log_span).repeat_interleave(self.branches)[:, None, None]

    def project(self, x):
        """The queries, keys, values, and lambda (None for one map) of x (B, T, C)."""
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, d)
        k = self.k_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, d)
        v = self.v_proj(x).view(B, T, self.n_value_head, -1).transpose(1, 2)  # (B, h, T, d_v)
        lam = self.lambda_full() if self.branches == 2 else None
        return q, k, v, lam

    def forward(self, x, rope=None, state=None):
        """(B, T, C) to (B, T, C). An empty state is filled from x, a filled one takes one token."""
        B, T, C = x.shape
        rope = rope or self.rope(x)
        q, k, v, lam = self.project(x)
        if state:
            y = self.step(q, k, v, lam, rope, state)  # (B, h, 1, d_v)
        else:
            if state is not None:
                self.fill(k, v, lam, rope, state)
            if self.flash:
                y = self.fast(q, k, v, lam, rope)  # (B, h, T, d_v)
            else:
                y = self.attention_map(q, k, lam, rope).to(v.dtype) @ v
        if self.subln is not None:
            y = self.subln(y.type_as(self.subln.weight)) * self.subln_scale
        y = y.transpose(1, 2).reshape(B, T, C)  # the heads side by side again
        return self.out_proj(y.to(v.dtype))

    def map(self, x):
        """The map of x (B, T, C), (B, h, T, T), to look at."""
        q, k, _, lam = self.project(x)
        return self.attention_map(q, k, lam, self.rope(x))

    def rope(self, x):
        """The table for a layer that is called without its GPT."""
        return rotary_table(torch.arange(x.shape[1], device=x.device), self.config, wide_dtype(x))


class Softmax(Attention):
    """A = softmax(Q K^T / sqrt(d) + log D)"""

    def scores(self, q, k, rope):
        """Q K^T / sqrt(d), (B, H, T, T)."""
        scores = rotate(q, rope) @ rotate(k, rope).mT / math.sqrt(self.head_dim)
        return scores if self.score_hook is None else self.score_hook(scores)

    def attention_map(self, q, k, lam, rope):
        rate = self.decay_rate(q.device, wide_dtype(q))
        log_D = log_mask(rate, distances(q.shape[2], q.device))
        A = F.softmax(upcast(self.scores(q, k, rope)) + log_D, dim=-1)  # (B, H, T, T)
        return self.subtract(A, lam)

    def fast(self, q, k, v, lam, rope):
        """(A_1 - lambda A_2) V = A_1 V - lambda A_2 V, in a fused kernel that does not hold A."""
        rate = self.decay_rate(q.device, wide_dtype(q)) if self.config.decay else None
        q = rotate(q, rope)
        k = rotate(k, rope)
        y = softmax_attention(q, k, v, rate, self.kernel)  # (B, H, T, d_v)
        return self.subtract(y, lam)

    def fill(self, k, v, lam, rope, state):
        """The cache, with room for block_size tokens, so that every step has the same shapes."""
        room = self.config.block_size - k.shape[2]
        if room < 0:
            block_size = self.config.block_size
            raise ValueError(f"{k.shape[2]} tokens don't fit into a cache of {block_size}")
        state["k"] = F.pad(rotate(k, rope), (0, 0, 0, room))  # (B, H, block_size, d)
        state["v"] = F.pad(v, (0, 0, 0, room))  # (B, h, block_size, d_v)

    def step(self, q, k, v, lam, rope, state):
        """The last row of each map over the whole cache: log D hides what is not filled yet."""
        state["k"].index_copy_(2, rope.position, rotate(k, rope))  # fails when the cache is full
        state["v"].index_copy_(2, rope.position, v)
        # scores in float32, as the fused kernels have them
        with torch.autocast(q.device.type, enabled=False):
            scores = upcast(rotate(q, rope)) @ upcast(state["k"]).mT / math.sqrt(self.head_dim)
        distance = rope.position[:, None] - torch.arange(self.config.block_size, device=q.device)
        log_D = log_mask(self.decay_rate(q.device, scores.dtype), distance)
        A = F.softmax(scores + log_D, dim=-1)  # (B, H, 1, block_size)
        # both branches of a head read the same values. As two rows of one product they need no copy
        A = A.unflatten(1, (self.n_value_head, -1)).squeeze(3)  # (B, h, branches, block_size)
        y = A.to(v.dtype) @ state["v"]  # (B, h, branches, d_v)
        y = y.flatten(1, 2)[:, :, None]  # (B, H, 1, d_v)
        return self.subtract(y, lam)


class Diff(Softmax):
    """A = softmax(Q_1 K_1^T / sqrt(d)) - lambda softmax(Q_2 K_2^T / sqrt(d))   (Eq. 1)"""

    branches = 2


def phi(x):
    """elu(x) + 1 (arXiv 2006.16236, Eq. 7), written so that bf16 keeps its small values.

    elu(x) is near -1 there, and -1 + 1 would be 0.
    """
    return F.relu(x) + torch.exp(x.clamp(max=0))


def to_chunks(x):
    """(B, H, T, f) to (B, H, chunks, CHUNK, f). The last chunk is filled up with zeros."""
    x = F.pad(x.contiguous(), (0, 0, 0, -x.shape[2] % CHUNK))
    return x.unflatten(2, (-1, CHUNK))


def chunkwise(q, k, v, rate):
    """y_i = sum over j <= i of gamma^(i - j) (q_i . k_j) v_j, without the T x T map.

    A query reads its own chunk of tokens through a small map. It reads all earlier chunks through
    one matrix that stands for them, the state S = sum over j of gamma^age k_j v_j^T.

    q, k (B, H, T, f), v (B, H, T, d_v), rate = -log gamma (H, 1, 1). Returns (B, H, T, d_v). Any
    count of heads and features will do. It costs O(T), and a little that grows with (T/CHUNK)^2.
    """
    T = v.shape[2]
    dtype = v.dtype
    q = to_chunks(q.to(dtype))  # (B, H, N, CHUNK, f) with N chunks
    k = to_chunks(k.to(dtype))
    v = to_chunks(v)
    N = v.shape[2]
    i = torch.arange(CHUNK, device=v.device)[:, None]  # (CHUNK, 1), a token's place in its chunk

    # 1. its own chunk: the masked map of CHUNK x CHUNK tokens
    D = log_mask(rate, distances(CHUNK, v.device)).exp()[:, None].to(dtype)  # (H, 1, CHUNK, CHUNK)
    own = ((q @ k.mT) * D) @ v

    # 2. the state of each chunk alone, at its last token: the keys before it have faded
    fade_to_end = torch.exp(-rate * (CHUNK - 1 - i))[:, None].to(dtype)  # (H, 1, CHUNK, 1)
    of_chunk = (k * fade_to_end).mT @ v  # (B, H, N, f, d_v)

    # 3. the state before each chunk: the sum of all earlier ones, faded by the whole chunks in
    #    between. A lower triangular matrix sums them in one product, with no loop over the chunks
    chunks_between = distances(N, v.device) - 1  # below 0 for the chunk itself: it is not earlier
    carry = log_mask(CHUNK * rate, chunks_between).exp().to(dtype)  # (H, N, N)
    before = (carry @ of_chunk.flatten(3)).view_as(of_chunk)

    # 4. what a query reads from that state, faded from the chunk's beginning to the query
    fade_from_start = torch.exp(-rate * (i + 1))[:, None].to(dtype)  # (H, 1, CHUNK, 1)
    earlier = (q * fade_from_start) @ before

    return (own + earlier).flatten(2, 3)[:, :, :T]


class Linear(Attention):
    """A_ij = (R_i phi(q_i)) . (R_j phi(k_j)) D_ij / z_i, z_i = sum over j of phi(q_i) . phi(k_j) D_ij

    R is the rotation. Only the numerator is rotated, so that z stays above 0 (RoFormer, Section
    3.3). So entries of a map may be negative, and a row need not sum to 1.
    """

    def scores(self, q, k, rope):
        """The numerator without its mask, (B, H, T, T)."""
        scores = rotate(phi(q), rope) @ rotate(phi(k), rope).mT
        return scores if self.score_hook is None else self.score_hook(scores)

    def attention_map(self, q, k, lam, rope):
        rate = self.decay_rate(q.device, wide_dtype(q))
        D = log_mask(rate, distances(q.shape[2], q.device)).exp()
        weights = upcast(phi(q) @ phi(k).mT) * D  # all positive
        z = weights.sum(-1, keepdim=True) + ROW_SUM_EPS  # (B, H, T, 1)
        A = upcast(self.scores(q, k, rope)) * D / z  # (B, H, T, T)
        return self.subtract(A, lam)

    def fold_q(self, q, lam):
        """The queries [q_1, -lambda q_2] of one linear attention that stands for both branches.

        With the keys of fold_k its weights are q_1 . k_1 - lambda q_2 . k_2. So the difference of
        two linear maps is one linear attention, whose features are signed and twice as many.
        """
        if self.branches == 1:
            return q
        return torch.cat((q[:, 0::2], -lam * q[:, 1::2]), dim=-1)  # (B, h, T, 2d)

    def fold_k(self, k):
        """The keys [k_1, k_2], see fold_q."""
        if self.branches == 1:
            return k
        return torch.cat((k[:, 0::2], k[:, 1::2]), dim=-1)  # (B, h, T, 2d)

    def fast(self, q, k, v, lam, rope):
        """1/z belongs to the row i, so it moves into the query: A_ij = (q_i/z_i) . k_j D_ij."""
        q = phi(q)
        k = phi(k)
        rate = self.decay_rate(q.device, wide_dtype(q))
        # the decayed running sum of k: chunkwise with all queries and keys 1, and k for the values
        one = q.new_ones(1, 1, q.shape[2], 1)
        key_sum = chunkwise(one, one, k, rate)  # (B, H, T, d)
        z = (upcast(q) * key_sum).sum(-1, keepdim=True) + ROW_SUM_EPS  # (B, H, T, 1)
        q = self.fold_q(rotate(q, rope) / z, lam)
        k = self.fold_k(rotate(k, rope))
        return chunkwise(q, k, v, rate[:: self.branches])

    def fill(self, k, v, lam, rope, state):
        """S = sum of gamma^age (R phi(k)) v^T and Z = sum of gamma^age phi(k).

        Both in float32, since the steps add to them.
        """
        k = upcast(phi(k))
        age = torch.arange(k.shape[2] - 1, -1, -1, device=k.device)  # of the last token 0
        fade = torch.exp(-self.decay_rate(k.device, k.dtype) * age[:, None])  # (H, T, 1)
        with torch.autocast(k.device.type, enabled=False):
            folded = self.fold_k(rotate(k, rope) * fade)  # (B, h, T, d_v)
            state["S"] = folded.mT @ upcast(v)  # (B, h, d_v, d_v)
            state["Z"] = (k * fade).sum(2, keepdim=True)  # (B, H, 1, d)

    def step(self, q, k, v, lam, rope, state):
        """A recurrent net (2006.16236, Eq. 18 to 20).

        Z <- gamma Z + phi(k), S <- gamma S + k v^T, y = q S
        """
        q = phi(q)
        k = phi(k)
        gamma = torch.exp(-self.decay_rate(q.device, wide_dtype(q)))
        state["Z"].mul_(gamma).add_(k)
        z = (q * state["Z"]).sum(-1, keepdim=True) + ROW_SUM_EPS
        q = self.fold_q(rotate(q, rope) / z, lam)
        k = self.fold_k(rotate(k, rope))
        state["S"].mul_(gamma[:: self.branches]).add_(upcast(k).mT * upcast(v))
        # q S, written as a product and a sum: autocast would make a matmul bf16
        return (upcast(q).mT * state["S"]).sum(2, keepdim=True)


class DiffLinear(Linear):
    """A = A_1 - lambda A_2 of linear maps: one linear attention with signed features, see fold_q."""

    branches = 2


ATTENTION = {"softmax": Softmax, "diff": Diff, "linear": Linear, "diff_linear": DiffLinear}


class MLP(nn.Module):
    """SwiGLU(x) = (silu(x W_gate) * x W_up) W_down   (Section 2.2 of the paper)"""

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        width = config.mlp_width or int(8 * C / 3) // 8 * 8
        self.gate_proj = nn.Linear(C, width, bias=False)
        self.up_proj = nn.Linear(C, width, bias=False)
        self.down_proj = nn.Linear(width, C, bias=False)
        self.down_proj.weight.init_std = residual_std(width, config)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and then the MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config, depth):
        super().__init__()
        self.attn = ATTENTION[config.attn](config, depth)
        self.norm1 = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        self.norm2 = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        self.mlp = MLP(config)

    def forward(self, x, rope, state=None):
        x = x + self.attn(self.norm1(x), rope, state)
        x = x + self.mlp(self.norm2(x))
        return x


def init_std(fan_in):
    """The standard deviation that PyTorch gives nn.Linear. At 768 channels it is GPT-2's 0.02.

    At 128 channels 0.02 would be too small: the scores start near 0 and every map is flat.
    """
    return 1 / math.sqrt(3 * fan_in)


def residual_std(fan_in, config):
    """Smaller for a matrix that ends a residual branch: 2 n_layer of them are added up (GPT-2)."""
    return init_std(fan_in) / math.sqrt(2 * config.n_layer)


class GPT(nn.Module):
    """The whole model. model(idx) and model(idx, targets) give (logits, loss), see forward.

    idx and targets are (B, T) int64. Any T will do, also one beyond block_size.
    seed: the weights are drawn from it. None leaves them without numbers, for GPT.load to fill in.
    """

    def __init__(self, config, seed=1337):
        super().__init__()
        self.config = config
        self.extra = {}  # what GPT.load found beside the model
        with torch.device("meta"):  # shapes without numbers
            padded_vocab = math.ceil(config.vocab_size / 64) * 64  # GPUs like multiples of 64
            self.wte = nn.Embedding(padded_vocab, config.n_embd)
            self.blocks = nn.ModuleList(Block(config, depth) for depth in range(config.n_layer))
            self.norm = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        if seed is not None:
            weights = {name: draw_parameter(name, p, seed) for name, p in self.named_parameters()}
            self.load_state_dict(weights, assign=True)

    def rope(self, T, start=0):
        """The rotary table of T tokens from position `start` on, for all layers."""
        weight = self.wte.weight
        position = start + torch.arange(T, device=weight.device)
        return rotary_table(position, self.config, wide_dtype(weight))

    def logits(self, x):
        """(B, T, C) to (B, T, vocab_size). The output layer is the embedding (tied weights)."""
        logits = F.linear(self.norm(x), self.wte.weight)
        return logits[..., : self.config.vocab_size]

    def forward(self, idx, targets=None):
        """With targets: the logits (B, T, vocab_size), detached, and the mean loss in nats.

        Without: the logits of the last token alone, (B, 1, vocab_size), and None.
        """
        x = self.wte(idx)
        rope = self.rope(idx.shape[1])
        for block in self.blocks:
            x = block(x, rope)
        if targets is None:
            return self.logits(x[:, -1:]), None
        logits = self.logits(x)
        loss = F.cross_entropy(upcast(logits).flatten(0, 1), targets.flatten())
        return logits.detach(), loss

    def prefill(self, idx):
        """Read a prompt (B, T): its last logits, (B, 1, vocab_size), and the state for `step`.

        The state holds "length", the tokens so far, and "layers", a dict of tensors for each layer.
        The softmax arms raise ValueError for more than block_size tokens.
        """
        state = {"length": torch.tensor([idx.shape[1]], device=idx.device), "layers": []}
        x = self.wte(idx)
        rope = self.rope(idx.shape[1])
        for block in self.blocks:
            layer_state = {}
            x = block(x, rope, layer_state)
            state["layers"].append(layer_state)
        # the steps write to these tensors in place, and a CUDA graph may rely on where they are
        for tensors in [state, *state["layers"]]:
            for tensor in tensors.values():
                if isinstance(tensor, torch.Tensor):
                    torch._dynamo.mark_static_address(tensor, guard=False)
        return self.logits(x[:, -1:]), state

    def step(self, idx, state):
        """Read one more token, idx (B, 1): the logits after it, (B, 1, vocab_size).

        The state moves on in place.
        """
        x = self.wte(idx)
        rope = self.rope(1, start=state["length"])
        for block, layer_state in zip(self.blocks, state["layers"]):
            x = block(x, rope, layer_state)
        state["length"] += 1
        return self.logits(x)

    def generate(
        self,
        idx,
        max_new_tokens,
        temperature=1.0,
        top_k=None,
        top_p=None,
        generator=None,
        step=None,
    ):
        """Yields max_new_tokens times the next token of each row of idx (B, T), (B,) int64.

        temperature: 0 takes the likeliest token. top_k keeps so many of the likeliest, top_p the
        fewest that together reach this probability. step: a compiled self.step, to use instead.
        """
        if not temperature >= 0:
            raise ValueError(f"temperature must be 0 or more, not {temperature}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be 1 or more, not {top_k}")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {top_p}")
        choose = partial(
            next_token, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
        )
        return self._generate(idx, max_new_tokens, choose, step or self.step)

    @torch.inference_mode()
    def _generate(self, idx, max_new_tokens, choose, step):
        has_cache = isinstance(self.blocks[0].attn, Softmax)  # else the state never fills up
        block_size = self.config.block_size
        context = idx[:, -block_size:] if has_cache else idx
        state = None
        for _ in range(max_new_tokens):
            if has_cache and context.shape[1] > block_size:
                # the cache is full, so we read the newer half again. To drop the oldest keys would not
                # be enough: what deeper layers keep was computed from the tokens that we drop
                context = context[:, -max(1, block_size // 2) :]
                state = None
            if state is None:
                logits, state = self.prefill(context)
            else:
                logits = step(token, state)
            token = choose(logits[:, -1])
            if has_cache:
                context = torch.cat((context, token), dim=1)
            yield token[:, 0]

    def save(self, path, **extra):
        """Write the model and extra (tensors and plain values) to path. Raises OSError if it can't.

        Whenever we are killed, the file at path is whole: the old one or the new one.
        """
        content = {"config": asdict(self.config), "model": self.state_dict(), **extra}
        try:
            with open(f"{path}.tmp", "wb") as f:
                torch.save(content, f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(f"{path}.tmp", path)
        except RuntimeError as e:  # this is how torch.save says that the disk is full
            os.remove(f"{path}.tmp")
            reason = str(e).splitlines()[0]
            raise OSError(f"{path} could not be written, is the disk full? ({reason})") from None

    @classmethod
    def load(cls, path, device="cpu"):
        """The model that save() wrote, on device. What else was saved is in its .extra.

        Runs no code from the file. Raises OSError for a file that can't be read, and ValueError for
        one that is damaged, or not ours, or holds a model that we don't know.
        """
        os.stat(path)  # a missing file is an OSError
        try:
            if zipfile.ZipFile(path).testzip() is not None:
                raise ValueError("a checksum is wrong")
            extra = torch.load(path, map_location="cpu", weights_only=True)
            config = dict(extra.pop("config"))
            weights = extra.pop("model")
        except Exception as e:  # of a dozen classes, it depends on which byte is wrong
            reason = f"{path} is damaged, or no checkpoint of this project: {e!r:.120}"
            raise ValueError(reason) from None
        unknown = config.keys() - asdict(GPTConfig()).keys()
        if unknown:
            names = ", ".join(sorted(unknown))
            raise ValueError(f"{path} was saved with settings unknown to this model.py: {names}")
        try:
            model = cls(GPTConfig(**config), seed=None)
            model.load_state_dict(weights, assign=True)
        except ValueError as e:
            raise ValueError(f"{path} holds a model unknown to this model.py: {e}") from None
        except RuntimeError as e:
            reason = " ".join(str(e).split())
            raise ValueError(f"{path}: the weights don't fit the model: {reason:.120}") from None
        if not all(p.isfinite().all() for p in model.parameters()):
            raise ValueError(f"{path} has weights that are not finite")
        model.extra = extra
        return model.to(device)


def draw_parameter(name, p, seed):
    """The first value of a parameter: N(0, std) for matrices, a constant for the weights of norms.

    Each parameter has a generator of its own, seeded by the seed and its name. So what two arms
    have in common starts with the same bits, whatever else they have.

    A matrix starts with init_std of its inputs, unless it carries an init_std of its own: out_proj
    and down_proj are smaller, and the lambda vectors have 0.1. A norm starts at 1, or at the
    init_value that its weight carries.
    """
    if p.ndim == 1 and not hasattr(p, "init_std"):
        return torch.full(p.shape, getattr(p, "init_value", 1.0))
    std = getattr(p, "init_std", None) or init_std(fan_in=p.shape[-1])
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
    return torch.randn(p.shape, generator=generator) * std


def next_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Choose the next token, (B, 1) int64, by the logits (B, vocab_size). See GPT.generate."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    temperature = max(temperature, 1e-6)  # the logits would overflow
    probs = F.softmax(upcast(logits) / temperature, dim=-1)
    if top_k is None and top_p is None:
        return torch.multinomial(probs, 1, generator=generator)
    probs, tokens = probs.sort(descending=True)
    if top_k is not None:
        probs[:, top_k:] = 0
    if top_p is not None:
        total = probs.cumsum(-1)
        likelier = total - probs  # the probability of all likelier tokens together
        probs[likelier >= top_p * total[:, -1:]] = 0
    return tokens.gather(-1, torch.multinomial(probs, 1, generator=generator))


# The kernels behind softmax's fast form: the backends of PyTorch's scaled_dot_product_attention
# that each may use. Its math backend is in none of them: it holds the whole map, slow in silence.
KERNELS = {
    "sdpa": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "flash_attn": None,  # the package of that name, see flash_attention
}


def softmax_attention(q, k, v, rate, kernel):
    """softmax(q k^T / sqrt(d) + log D) v, (B, H, T, d_v).

    q, k (B, H, T, d), v (B, h, T, d_v). rate is -log gamma, (H, 1, 1), or None without decay. With
    decay all kernels but flash_attn read log D from a matrix of H T^2 numbers: for 12 heads in bf16
    25 MB at T = 1,024 and 6.4 GB at T = 16,384. On CUDA PyTorch's flash kernel does not take it.
    """
    T, d = q.shape[2:]
    d_v = v.shape[-1]
    if kernel == "cudnn" and T == 1:
        kernel = "sdpa"  # cudnn refuses a single token
    if kernel == "flash_attn":
        return flash_attention(q, k, v, rate)
    if kernel != "cudnn":  # which alone lets two heads of q read one head of v
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    if kernel == "sdpa":  # flash kernels want d = d_v. Zeros change no product of q and k
        q = F.pad(q, (0, d_v - d))
        k = F.pad(k, (0, d_v - d))
    log_D = None
    if rate is not None:
        log_D = log_mask(rate, distances(T, q.device)).to(q.dtype)[None]  # (1, H, T, T)
    shared_v = v.shape[1] < q.shape[1]
    with sdpa_kernel(KERNELS[kernel]):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=log_D, is_causal=log_D is None, scale=d**-0.5, enable_gqa=shared_v
        )


def flash_attention(q, k, v, rate):
    """The same by flash-attn-4 or, where it is missing, flash-attn 2. Not yet run on a GPU."""
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, T, H, d)
    scale = q.shape[-1] ** -0.5
    try:
        from flash_attn.cute import flash_attn_func as flash_attn_4
    except ImportError:
        flash_attn_4 = None
    if flash_attn_4 is not None and rate is None:  # it takes d_v = 2d
        y, _ = flash_attn_4(q, k, v, softmax_scale=scale, causal=True)
        return y.transpose(1, 2)
    from flash_attn import flash_attn_func as flash_attn_2

    slopes = None if rate is None else rate.flatten().float()  # decay is an ALiBi bias
    halves = v.split(q.shape[-1], dim=-1)  # it wants d_v = d: the paper's FlashDiffAttn_2
    options = {"softmax_scale": scale, "causal": True, "alibi_slopes": slopes}
    y = torch.cat([flash_attn_2(q, k, half, **options) for half in halves], dim=-1)
    return y.transpose(1, 2)


def pick_kernel(model, name="auto", dtype=torch.float32):
    """Put one of KERNELS behind the softmax arms' fast form.

    Each is tried on random tokens and must give what the map gives, gradients too. "auto" takes the
    first that does, a name takes that one. Returns its name, and why a faster one can't be had.
    Returns None and "" for a model that uses no kernel. Raises ValueError if none can be had.
    """
    layers = [block.attn for block in model.blocks]
    device = model.wte.weight.device
    if not isinstance(layers[0], Softmax) or not layers[0].flash:
        if name != "auto":
            raise ValueError(f"kernel {name} would not be used: only softmax's fast form has one")
        return None, ""
    names = ["sdpa", "efficient"]  # from the fastest
    if device.type == "cuda" and dtype == torch.float32:
        names = ["efficient", "sdpa"]  # flash kernels want bf16
    elif device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        names = ["cudnn", *names]  # the faster one on Hopper, not on other cards
    reasons = []
    for kernel in names if name == "auto" else [name]:
        for layer in layers:
            layer.kernel = kernel
        try:
            if kernel_error(layers[0], device, dtype) < 0.05:
                return kernel, "; ".join(reasons)
            reasons.append(f"kernel {kernel} can't be used: its result differs from the map's")
        except (RuntimeError, ImportError, AssertionError) as e:
            reasons.append(f"kernel {kernel} can't run on {device}: {str(e).splitlines()[0]}")
    raise ValueError("; ".join(reasons))


def kernel_error(layer, device, dtype):
    """How far a layer's fast form is from its map, relatively: the output or the worst gradient."""
    T = 130  # 64 does not divide it
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(1, T, layer.config.n_embd, generator=generator, device=device)
    rope = layer.rope(x)
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        with torch.no_grad():
            q, k, v, lam = layer.project(x)
        inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
        fast = layer.fast(q, k, v, lam, rope)
        by_map = layer.attention_map(q, k, lam, rope).to(v.dtype) @ v
    fast_gradients = torch.autograd.grad(upcast(fast).square().sum(), inputs)
    map_gradients = torch.autograd.grad(upcast(by_map).square().sum(), inputs)
    errors = []
    for a, b in zip([fast, *fast_gradients], [by_map, *map_gradients]):
        errors.append((upcast(a) - upcast(b)).norm() / upcast(b).norm())
    return max(errors).item()


def open_device(name):
    """The device of that name. Raises ValueError if there is none, or if it can't be used."""
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"--device={name}: {str(e).splitlines()[0]}") from None


def round_to_bf16(model):
    """Cast the weights to bf16, to sample. Not the lambdas: rounded they are off by up to 0.4 %."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding, nn.RMSNorm)):
            module.bfloat16()


def demo():
    """For each arm: how near its three forms are in float64, and the first head's map of 4 tokens."""
    for attn in ATTENTION:
        config = GPTConfig(attn=attn, n_layer=1, n_head=4, n_embd=64)
        model = GPT(config).double()
        layer = model.blocks[0].attn
        x = 3 * torch.randn(1, 200, 64, dtype=torch.float64)
        fast = layer(x)

        state = {}
        steps = [layer(x[:, :1], model.rope(1), state)]
        for t in range(1, 200):
            steps.append(layer(x[:, t : t + 1], model.rope(1, start=t), state))

        layer.flash = False
        by_map = layer(x)
        map_error = (fast - by_map).abs().max()
        step_error = (fast - torch.cat(steps, dim=1)).abs().max()
        print(f"\n{attn}: fast - map {map_error:.0e}, fast - steps {step_error:.0e}. A map:")
        for row in layer.map(x[:, :4])[0, 0]:
            print("".join(f"{a:7.2f}" for a in row), f"   sum {row.sum():.2f}")


if __name__ == "__main__":
    demo()
