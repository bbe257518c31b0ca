"""
Five kinds of attention ("arms") in one GPT.

                one map     one map minus       the difference of two maps
                            the average
    softmax     softmax     --minus_average     diff, diff_v2
    linear      linear      --minus_average     diff_linear

    diff        Differential Transformer, arXiv 2410.05258. Below it is "the paper", and Eq. 1 to 3
                are its equations
    diff_v2     its authors' second version, see DiffV2
    linear      Transformers are RNNs, arXiv 2006.16236

Attention multiplies the values V by a causal T x T matrix A, which we call the map: row i says how
much token i takes from each token j <= i. Every map is made of weights w, a mask D and row sums z:

    A_ij = w_ij D_ij / z_i

    softmax     w_ij = exp((R_i q_i) . (R_j k_j) / sqrt(d))
                z_i = sum over j of w_ij D_ij
    linear      w_ij = (R_i phi(q_i)) . (R_j phi(k_j))
                z_i = sum over j of phi(q_i) . phi(k_j) D_ij

    R_i     the rotary embedding, a rotation that depends on the position i. Linear attention has it
            in the weights but not in the sums, see Linear
    phi     a feature map, all of whose values are positive
    D_ij    1 for j <= i, and 0 for the future. With `decay` it is gamma^(i - j) for j <= i, so that
            a head forgets

A differential arm has the difference of two maps, A = A_1 - lambda A_2, with a learned lambda. One
map gives some weight to all tokens, also to those that don't matter. What two maps have in common
cancels in their difference.

Between one map and two stands A - lambda U, where U is the average: w = 1 for all tokens, so that
U V is the running mean of the values. It shows what a minus does without a second map.

Each kind of attention is written three times. A test checks that the three forms agree.

    the map form     computes A itself, O(T^2), in a few lines that read like the equation. It is
                     for looking at A, and for tests
    the fast form    computes A V without A: softmax in fused kernels, linear attention in chunks
                     of tokens. It is for training
    the step form    takes one token at a time, with a state: softmax keeps the keys and values of
                     all tokens so far, linear attention a matrix of fixed size. It is for sampling

Letters in the comments on shapes:

    B batch, T time (tokens), C channels (n_embd)
    H heads of queries and keys (n_head), d = C/H channels each
    h heads of values, d_v channels each

With one map, h = H and d_v = d. With two, the query heads 2n and 2n+1 are the two branches of value
head n: there are half as many value heads, each twice as wide, so h = H/2 and d_v = 2d. The number
of parameters is the same but for lambda and the norm. (DiffV2 differs: it adds queries instead.)
"""
import hashlib
import math
import os
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
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
    """The settings of a model. Raises ValueError for a model that can't be built."""

    attn: str = "softmax"  # a name in ATTENTION
    # the tokens of a training sequence. It is also the room in softmax's cache, and it sets the
    # spans of decay: with decay, a model with another block_size computes another function
    block_size: int = 1024
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12  # heads of queries and keys. diff and diff_linear have half as many of values
    n_embd: int = 768
    mlp_width: int | None = None  # None: 8/3 n_embd, rounded down to a multiple of 8
    rope_theta: float = 10000.0  # base of the rotary embedding's angles. 0: no rotary embedding
    flash: bool = True  # compute attention in the fast form. False: in the map form
    kernel: str = "sdpa"  # softmax's fast form: PyTorch's kernels, or the package "flash_attn"
    decay: bool = False  # heads forget, see Attention.decay_rate
    minus_average: bool = False  # A - lambda U in place of A, for the arms with one map
    subln: bool | None = None  # an RMSNorm on each head's output. None: only in the paper's arms
    subln_init: float = 1.0  # the initial weight of that norm
    lambda_init: float | None = None  # for diff and diff_linear. None: the paper's formula
    embd_init: float | None = None  # initial std of the embedding. None: that of every matrix

    def __post_init__(self):
        if self.attn not in ATTENTION:
            raise ValueError(f"attn must be one of {', '.join(ATTENTION)}, not {self.attn!r}")
        if self.kernel not in ("sdpa", "flash_attn"):
            raise ValueError(f"kernel must be sdpa or flash_attn, not {self.kernel!r}")
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.rope_theta >= 0:
            raise ValueError(f"rope_theta must be 0 or more, not {self.rope_theta}")
        arm = ATTENTION[self.attn]
        if self.n_head % arm.branches != 0 and not arm.second_queries:
            raise ValueError(f"n_head must be even for {self.attn}, not {self.n_head}")
        # a head needs an even size: the rotary embedding turns pairs of channels
        if self.n_embd % (2 * self.n_head) != 0:
            raise ValueError(f"n_embd must be a multiple of {2 * self.n_head}, not {self.n_embd}")
        if self.minus_average and arm.branches == 2:
            raise ValueError(f"minus_average is for one map, and {self.attn} has two")


def wide_dtype(x):
    """float32 for bf16 and fp16. Else x's own dtype, so that float64 stays float64."""
    return torch.promote_types(x.dtype, torch.float32)


def upcast(x):
    """x in its wide dtype, for sums, norms and differences that bf16 would round away."""
    return x.to(wide_dtype(x))


class Rope(NamedTuple):
    """The positions of tokens, (T,) int64, and the cosines and sines of their angles, (T, d/2)."""

    position: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def make_rope(position, config, dtype):
    """The Rope of positions m: the angles are m theta^(-2i/d) (RoFormer, arXiv 2104.09864)."""
    d = config.n_embd // config.n_head
    # in float64, so that position 10 million is turned as exactly as position 10. Apple's GPUs
    # have no float64, so for them we compute on the CPU (untested: we have no Mac)
    device = "cpu" if position.device.type == "mps" else position.device
    i = torch.arange(d // 2, device=device, dtype=torch.float64)
    frequency = config.rope_theta ** (-2 * i / d) if config.rope_theta else torch.zeros_like(i)
    angle = position.to(device)[:, None] * frequency  # (T, d/2)
    # stacked they are one table in memory. Else torch.compile would put the cosines into every
    # kernel that uses them, and compute them anew for each head: training took 1.5 times as long
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
    columns). It is never above 0, so no power of gamma overflows.
    """
    return (-rate * distance).masked_fill(distance < 0, -math.inf)


class Attention(nn.Module):
    """What all arms share: projections, lambda, the minus, the norm.

    layer(x) takes (B, T, C) to (B, T, C), and layer.map(x) is its map, (B, h, T, T). The parameters
    have the names and shapes of Microsoft's release, whose num_heads is our h. GPT draws their
    first values, see draw_parameters.

    Softmax and Linear add the attention itself, each form as a method, and the way to its state:

        maps(q, k, rope_q, rope_k, log_D)       the maps of all branches, (B, H, R, T)
        fast(q, k, v, lam, rope)                A V, (B, h, T, d_v)
        fill(k, v, rope, state, room)           fills the empty dict state from a prompt
        step(q, k, v, lam, rope, state)         the row of A V of the next token, (B, h, 1, d_v)
    """

    branches = 1  # maps per head of values
    second_queries = False  # the second map takes new queries, and not half of softmax's heads
    subln_by_default = False

    def __init__(self, config, depth):
        super().__init__()
        C = config.n_embd
        self.config = config
        self.head_dim = C // config.n_head
        self.n_head = 2 * config.n_head if self.second_queries else config.n_head
        self.n_value_head = self.n_head // self.branches

        # queries, keys and values of all heads side by side, and the projection of the output
        self.q_proj = nn.Linear(C, self.n_head * self.head_dim, bias=False)
        self.k_proj = nn.Linear(C, C, bias=False)
        self.v_proj = nn.Linear(C, C, bias=False)
        self.out_proj = nn.Linear(C, C, bias=False)

        self.lambda_init = 0.0  # the factor 1 - lambda_init in forward is then 1
        self.make_lambda(depth)
        self.subln = None
        if config.subln or (config.subln is None and self.subln_by_default):
            # the heads share one weight
            self.subln = nn.RMSNorm(C // self.n_value_head, eps=NORM_EPS)
            nn.init.constant_(self.subln.weight, config.subln_init)

    def make_lambda(self, depth):
        """The parameters of lambda. depth counts layers from 0, where the paper counts from 1."""
        if self.branches == 1:
            if self.config.minus_average:
                self.lambda_average = nn.Parameter(torch.tensor(0.2))
            return
        self.lambda_init = self.config.lambda_init
        if self.lambda_init is None:
            self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        # the four vectors of Eq. 2. A GPT draws them anew, by name. These values are for a layer
        # that is used alone
        self.lambda_q1 = nn.Parameter(torch.randn(self.head_dim) * 0.1)
        self.lambda_k1 = nn.Parameter(torch.randn(self.head_dim) * 0.1)
        self.lambda_q2 = nn.Parameter(torch.randn(self.head_dim) * 0.1)
        self.lambda_k2 = nn.Parameter(torch.randn(self.head_dim) * 0.1)

    def lambda_full(self):
        """lambda, one number for all heads of the layer. None where nothing is subtracted.

        With two maps it is that of Eq. 2, which starts near lambda_init.
        """
        if self.config.minus_average:
            return self.lambda_average
        if self.branches == 1:
            return None
        # (a * b).sum() and not a @ b: autocast would compute the dot product in bf16
        dot_1 = (upcast(self.lambda_q1) * upcast(self.lambda_k1)).sum()
        dot_2 = (upcast(self.lambda_q2) * upcast(self.lambda_k2)).sum()
        return torch.exp(dot_1) - torch.exp(dot_2) + self.lambda_init

    def get_lambda(self, x):
        """lambda for the layer's input x (B, T, C). Only DiffV2's depends on it."""
        return self.lambda_full()

    def subtract(self, y, lam):
        """Branch 1 minus lambda times branch 2, of maps or outputs: (B, H, ...) to (B, h, ...)."""
        if self.branches == 1:
            return y
        y = upcast(y)  # a difference of two nearly equal numbers
        return y[:, 0::2] - lam * y[:, 1::2]

    def decay_rate(self, device, dtype):
        """-log gamma = 1/span of each query head, (H, 1, 1). Without decay it is 0.

        After `span` tokens a weight has faded to 1/e. The spans of the h heads go from 4 tokens to
        2 block_size, evenly in log. A single head gets the middle of that range. Both branches of a
        head have the same span: fold_q needs one D for both.
        """
        if not self.config.decay:
            return torch.zeros(self.n_head, 1, 1, device=device, dtype=dtype)
        h = self.n_value_head
        log_shortest = math.log2(4)
        log_longest = math.log2(2 * self.config.block_size)
        if h == 1:
            log_shortest = log_longest = (log_shortest + log_longest) / 2
        log_span = torch.linspace(log_shortest, log_longest, h, device=device, dtype=dtype)
        return torch.exp2(-log_span).repeat_interleave(self.branches)[:, None, None]

    def project(self, x):
        """The queries, keys, values, and lambda (None without a minus) of x (B, T, C)."""
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.n_head, self.head_dim).transpose(1, 2)  # (B, H, T, d)
        k = self.k_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, d)
        v = self.v_proj(x).view(B, T, self.n_value_head, -1).transpose(1, 2)  # (B, h, T, d_v)
        if self.second_queries:
            # both queries of a head meet the same key. A key that is there twice is simple, and it
            # makes the cache of the keys twice as large as it has to be
            k = k.repeat_interleave(2, dim=1)
        return q, k, v, self.get_lambda(x)

    def forward(self, x, rope=None, state=None, room=None):
        """(B, T, C) to (B, T, C).

        rope: the table of the positions of x. Without one x starts at position 0.
        state: None in training. An empty dict is filled from x, the prompt. A filled one stands for
        the tokens so far, and x is the next token, at the position that rope has.
        room: the tokens for which softmax's state makes room, block_size by default.
        """
        B, T, C = x.shape
        if rope is None:
            rope = self.rope_from_0(x)
        q, k, v, lam = self.project(x)
        if state:
            y = self.step(q, k, v, lam, rope, state)  # (B, h, 1, d_v)
            if self.config.minus_average:
                y = upcast(y) - lam * self.average_step(v, rope, state)
        elif self.config.flash:
            y = self.fast(q, k, v, lam, rope)  # (B, h, T, d_v)
            if self.config.minus_average:
                y = upcast(y) - lam * self.average(v, rope)
        else:
            y = self.attention_map(q, k, lam, rope, rope).to(v.dtype) @ v  # (B, h, T, d_v)
        if state is not None and not state:
            self.fill(k, v, rope, state, room or self.config.block_size)
            if self.config.minus_average:
                state["V"] = (upcast(v) * self.fade(v)).sum(2, keepdim=True)  # (B, h, 1, d_v)

        if self.subln is not None:
            # nn.RMSNorm wants its input in the dtype of its weight
            y = self.subln(y.type_as(self.subln.weight))
            # the factor of Eq. 3. The paper's reason: with it gradients flow as in a Transformer
            # with one map, so that its settings can be kept
            y = y * (1 - self.lambda_init)
        # put the outputs of the heads side by side again
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.out_proj(y.to(v.dtype))

    def attention_map(self, q, k, lam, rope_q, rope_k):
        """A of the queries (B, H, R, d) and the keys (B, H, T, d), (B, h, R, T).

        The two tables say where queries and keys stand. A query sees the keys at its own position
        and before it.
        """
        distance = rope_q.position[:, None] - rope_k.position  # (R, T)
        log_D = log_mask(self.decay_rate(q.device, wide_dtype(q)), distance)  # (H, R, T)
        A = self.maps(q, k, rope_q, rope_k, log_D)  # (B, H, R, T)
        if self.config.minus_average:
            U = F.softmax(log_D, dim=-1)  # all weights alike: D over its row sums
            return A - lam * U
        return self.subtract(A, lam)

    def map(self, x):
        """The map of x (B, T, C), (B, h, T, T). Best in float32: bf16 rounds large scores."""
        q, k, _, lam = self.project(x)
        rope = self.rope_from_0(x)
        return self.attention_map(q, k, lam, rope, rope)

    def rope_from_0(self, x):
        """The Rope of x (B, T, C), for a layer that is used without its GPT."""
        return make_rope(torch.arange(x.shape[1], device=x.device), self.config, wide_dtype(x))

    def fade(self, x):
        """gamma^age of the tokens of x (B, H, T, d), (H, T, 1). The last token has age 0."""
        age = torch.arange(x.shape[2] - 1, -1, -1, device=x.device)
        return torch.exp(-self.decay_rate(x.device, wide_dtype(x)) * age[:, None])

    def average_count(self, rope, dtype):
        """The row sums of D, sum over j <= i of gamma^(i - j), (h, T, 1). Without decay i + 1."""
        n = (rope.position + 1).to(dtype)[:, None]
        if not self.config.decay:
            return n
        rate = self.decay_rate(n.device, dtype)
        return torch.expm1(-rate * n) / torch.expm1(-rate)  # a geometric series

    def average(self, v, rope):
        """U V, the running mean of the values v (B, h, T, d_v)."""
        total = decayed_cumsum(v, self.decay_rate(v.device, wide_dtype(v)))
        return upcast(total) / self.average_count(rope, wide_dtype(v))

    def average_step(self, v, rope, state):
        """The last row of U V, (B, h, 1, d_v). The state is the sum of all values so far."""
        gamma = torch.exp(-self.decay_rate(v.device, state["V"].dtype))
        state["V"].mul_(gamma).add_(v)
        return state["V"] / self.average_count(rope, state["V"].dtype)


class Softmax(Attention):
    """A = softmax(Q K^T / sqrt(d) + log D)"""

    def scores(self, q, k, rope_q, rope_k):
        """Q K^T / sqrt(d), (B, H, R, T)."""
        return rotate(q, rope_q) @ rotate(k, rope_k).mT / math.sqrt(self.head_dim)

    def maps(self, q, k, rope_q, rope_k, log_D):
        """F.softmax takes exp and divides by z in one call, so D goes into the exponent."""
        return F.softmax(upcast(self.scores(q, k, rope_q, rope_k)) + log_D, dim=-1)

    def fast(self, q, k, v, lam, rope):
        """(A_1 - lambda A_2) V = A_1 V - lambda A_2 V, in a fused kernel that does not hold A."""
        rate = self.decay_rate(q.device, wide_dtype(q)) if self.config.decay else None
        q = rotate(q, rope)
        k = rotate(k, rope)
        # the kernels stand at the end of the file
        attention = flash_attention if self.config.kernel == "flash_attn" else fused_attention
        y = attention(q, k, v, rate)  # (B, H, T, d_v)
        return self.subtract(y, lam)

    def fill(self, k, v, rope, state, room):
        """Begin the cache with all of its room, so that every step has the same shapes."""
        free = room - k.shape[2]
        if free < 0:
            raise ValueError(f"{k.shape[2]} tokens don't fit into a cache of {room}")
        state["k"] = F.pad(rotate(k, rope), (0, 0, 0, free))  # (B, H, room, d)
        state["v"] = F.pad(v, (0, 0, 0, free))  # (B, h, room, d_v)

    def step(self, q, k, v, lam, rope, state):
        """The last row of A V. log D hides the part of the cache that is not filled yet."""
        # a position beyond the cache is an IndexError, on CUDA a failed assertion of the device
        state["k"].index_copy_(2, rope.position, rotate(k, rope))
        state["v"].index_copy_(2, rope.position, v)
        # scores in float32, as the fused kernels have them
        with torch.autocast(q.device.type, enabled=False):
            scores = upcast(rotate(q, rope)) @ upcast(state["k"]).mT / math.sqrt(self.head_dim)
        distance = rope.position[:, None] - torch.arange(scores.shape[-1], device=q.device)
        log_D = log_mask(self.decay_rate(q.device, scores.dtype), distance)
        A = F.softmax(scores + log_D, dim=-1)  # (B, H, 1, room)
        # the branches of a head read the same values: one matmul serves both, with a row for each
        A = A.squeeze(2).unflatten(1, (-1, self.branches))  # (B, h, branches, room)
        y = A.to(v.dtype) @ state["v"]  # (B, h, branches, d_v)
        y = y.flatten(1, 2).unsqueeze(2)  # (B, H, 1, d_v)
        return self.subtract(y, lam)


class Diff(Softmax):
    """A = softmax(Q_1 K_1^T / sqrt(d)) - lambda softmax(Q_2 K_2^T / sqrt(d))   (Eq. 1)"""

    branches = 2
    subln_by_default = True


class DiffV2(Softmax):
    """A = A_1 - lambda A_2, with A_n = softmax(Q_n K^T / sqrt(d)) and lambda_i = sigmoid(x_i W).

    The second version of the paper's authors: https://huggingface.co/blog/microsoft/diff-attn-v2, a
    blog post of January 2026. It differs from Diff in this:

    - Keys and values are softmax's, H heads of d channels. Each head gets a second query, so q_proj
      is C x 2C. The queries 2n and 2n+1 are the branches of head n.
    - Each token and head has a lambda of its own, and there is no lambda_init.
    - There is no norm on the heads' output (subln=True adds one), and no factor 1 - lambda_init.

    So a layer has C^2 + C H parameters more than softmax's, and its MLP is narrower for it, see
    matched_width.
    """

    branches = 2
    second_queries = True

    def make_lambda(self, depth):
        self.lambda_proj = nn.Linear(self.config.n_embd, self.config.n_head, bias=False)

    def lambda_full(self):
        """None: there is no lambda that holds for the whole layer."""
        return None

    def get_lambda(self, x):
        """(B, H, T, 1) for x (B, T, C), each between 0 and 1. They start near 1/2."""
        return upcast(self.lambda_proj(x)).sigmoid().mT[..., None]


def phi(x):
    """elu(x) + 1 (arXiv 2006.16236, Eq. 7), written so that bf16 keeps its small values.

    For x below -7, elu(x) in bf16 is exactly -1, and 1 more would be 0.
    """
    return F.relu(x) + torch.exp(x.clamp(max=0))


def to_chunks(x):
    """(B, H, T, f) to (B, H, N, CHUNK, f). Zeros fill the last chunk up."""
    padding = -x.shape[2] % CHUNK
    # contiguous, because torch.compile would fail where T is unknown to it and padding may be 0
    x = F.pad(x.contiguous(), (0, 0, 0, padding))
    return x.unflatten(2, (-1, CHUNK))


def chunkwise(q, k, v, rate):
    """y_i = sum over j <= i of gamma^(i - j) (q_i . k_j) v_j, without the T x T map.

    Without an exp around q . k, the sum over j can be taken before the query comes:

        sum over j of (q . k_j) v_j = q S        with S = sum over j of k_j v_j^T, a matrix (f, d_v)

    So a query reads its own chunk of tokens through a small map, and all earlier chunks through one
    such matrix, the state, in which older keys have faded more.

    q, k (B, H, T, f), v (B, H, T, d_v), rate = -log gamma (H, 1, 1). Returns (B, H, T, d_v). q and
    k may have 1 in the place of B and H, as in decayed_cumsum. The cost is O(T), except for part 3
    below: it grows with N^2 and is as large as part 2 at N = CHUNK, that is at T = 4,096.
    """
    T = v.shape[2]
    # q was divided by z in float32. If the model is in bf16, a matmul of both would be an error
    dtype = v.dtype
    q = to_chunks(q.to(dtype))  # (B, H, N, CHUNK, f) with N chunks
    k = to_chunks(k.to(dtype))
    v = to_chunks(v)
    N = v.shape[2]
    i = torch.arange(CHUNK, device=v.device)[:, None]  # (CHUNK, 1), a token's place in its chunk

    # 1. what a query reads from its own chunk, through a masked map of CHUNK x CHUNK tokens
    D = log_mask(rate, distances(CHUNK, v.device)).exp()[:, None].to(dtype)  # (H, 1, CHUNK, CHUNK)
    y_own = ((q @ k.mT) * D) @ v

    # 2. the state of each chunk alone, as of its last token: older keys have faded until then
    fade_to_end = torch.exp(-rate * (CHUNK - 1 - i))[:, None].to(dtype)  # (H, 1, CHUNK, 1)
    S_chunk = (k * fade_to_end).mT @ v  # (B, H, N, f, d_v)

    # 3. the state before each chunk: the sum of the states of all earlier chunks, each faded by the
    #    whole chunks in between. Instead of a loop over the chunks, one matmul with a triangle
    chunks_between = distances(N, v.device) - 1  # -1 for the chunk itself, which is not earlier
    fade_between = log_mask(CHUNK * rate, chunks_between).exp().to(dtype)  # (H, N, N)
    S_before = (fade_between @ S_chunk.flatten(3)).view_as(S_chunk)  # (B, H, N, f, d_v)

    # 4. what a query reads from that state, which is as of the last token before the query's chunk.
    #    For the places a and b of key and query in their chunks, the fades of parts 2, 3 and 4 add
    #    up to the distance: (CHUNK - 1 - a) + CHUNK (chunks between) + (b + 1) = i - j
    fade_from_previous = torch.exp(-rate * (i + 1))[:, None].to(dtype)  # (H, 1, CHUNK, 1)
    y_earlier = (q * fade_from_previous) @ S_before

    return (y_own + y_earlier).flatten(2, 3)[:, :, :T]


def decayed_cumsum(k, rate):
    """sum over j <= i of gamma^(i - j) k_j, (B, H, T, d)."""
    # it is chunkwise with every q . k equal to 1, and with the keys in the place of the values
    one = k.new_ones(1, 1, k.shape[2], 1)
    return chunkwise(one, one, k, rate)


class Linear(Attention):
    """A_ij = (R_i phi(q_i)) . (R_j phi(k_j)) D_ij / z_i

    z_i = sum over j of phi(q_i) . phi(k_j) D_ij

    R is the rotation. Only the numerator is rotated, which keeps z above 0 (RoFormer, Section 3.3).
    Entries of a map may then be negative, and a row need not sum to 1.
    """

    def phi(self, x):
        """The feature map, all of whose values must be positive. A subclass may have another."""
        return phi(x)

    def scores(self, q, k, rope_q, rope_k):
        """The numerator without its mask, (B, H, R, T)."""
        return rotate(self.phi(q), rope_q) @ rotate(self.phi(k), rope_k).mT

    def maps(self, q, k, rope_q, rope_k, log_D):
        """The equation above, one factor a line."""
        D = log_D.exp()
        unrotated = upcast(self.phi(q) @ self.phi(k).mT) * D  # none is negative
        z = unrotated.sum(-1, keepdim=True) + ROW_SUM_EPS  # (B, H, R, 1)
        return upcast(self.scores(q, k, rope_q, rope_k)) * D / z  # (B, H, R, T)

    def fold_q(self, q, lam):
        """The queries [q_1, -lambda q_2], (B, h, T, 2d), of one linear attention for both branches.

        Here q_1 and q_2 are features, rotated, and each divided by the z of its own branch. With
        the keys [k_1, k_2] the weights are q_1 . k_1 - lambda q_2 . k_2, which is the difference of
        the two maps, since both branches have the same D. So the difference of two linear maps is
        one linear attention with twice as many features, half of them with a minus.
        """
        if self.branches == 1:
            return q
        return torch.cat((q[:, 0::2], -lam * q[:, 1::2]), dim=-1)

    def fold_k(self, k):
        """The keys [k_1, k_2], (B, h, T, 2d), see fold_q."""
        if self.branches == 1:
            return k
        return torch.cat((k[:, 0::2], k[:, 1::2]), dim=-1)

    def fast(self, q, k, v, lam, rope):
        """A V. z_i is the same for all of row i, so we divide the query by it first."""
        q = self.phi(q)
        k = self.phi(k)
        rate = self.decay_rate(q.device, wide_dtype(q))
        key_sum = decayed_cumsum(k, rate)  # (B, H, T, d)
        z = (upcast(q) * key_sum).sum(-1, keepdim=True) + ROW_SUM_EPS  # (B, H, T, 1)
        q = self.fold_q(rotate(q, rope) / z, lam)  # (B, h, T, f) with f = branches d
        k = self.fold_k(rotate(k, rope))  # (B, h, T, f)
        return chunkwise(q, k, v, rate[:: self.branches])  # a rate for each head of values

    def fill(self, k, v, rope, state, room):
        """S = sum of gamma^age k v^T with the folded keys, and Z = sum of gamma^age phi(k).

        Both stay in float32, since thousands of steps add to them. They need no more room for a
        longer text.
        """
        k = upcast(self.phi(k))
        fade = self.fade(k)  # (H, T, 1)
        state["Z"] = (k * fade).sum(2, keepdim=True)  # (B, H, 1, d)
        k = self.fold_k(rotate(k, rope) * fade)  # (B, h, T, f)
        with torch.autocast(k.device.type, enabled=False):
            state["S"] = k.mT @ upcast(v)  # (B, h, f, d_v)

    def step(self, q, k, v, lam, rope, state):
        """One step of a recurrent net (2006.16236, Eq. 18 to 20).

        Z <- gamma Z + phi(k), z = phi(q) . Z, S <- gamma S + k v^T, y = q S with q and k folded
        """
        q = self.phi(q)
        k = self.phi(k)
        gamma = torch.exp(-self.decay_rate(q.device, wide_dtype(q)))
        state["Z"].mul_(gamma).add_(k)
        z = (q * state["Z"]).sum(-1, keepdim=True) + ROW_SUM_EPS  # (B, H, 1, 1)
        q = self.fold_q(rotate(q, rope) / z, lam)  # (B, h, 1, f)
        k = self.fold_k(rotate(k, rope))  # (B, h, 1, f)
        state["S"].mul_(gamma[:: self.branches]).add_(upcast(k).mT * upcast(v))
        # q S as a product and a sum, since autocast would round a matmul to bf16
        return (upcast(q).mT * state["S"]).sum(2, keepdim=True)  # (B, h, 1, d_v)


class DiffLinear(Linear):
    """A = A_1 - lambda A_2, two linear maps. They are folded into one attention, see fold_q."""

    branches = 2
    subln_by_default = True


ATTENTION = {
    "softmax": Softmax,
    "diff": Diff,
    "diff_v2": DiffV2,
    "linear": Linear,
    "diff_linear": DiffLinear,
}


def full_width(n_embd):
    """The width of an MLP: 8/3 n_embd, rounded down to a multiple of 8."""
    return max(8, 8 * n_embd // 3 // 8 * 8)


def matched_width(n_embd, n_head):
    """The width of an MLP beside which DiffV2 has softmax's parameters, within 3/2 n_embd."""
    more = n_embd * n_embd + n_embd * n_head  # the second queries, and lambda
    # each unit of width has a row in three matrices
    return max(8, full_width(n_embd) - round(more / (3 * n_embd)))


class MLP(nn.Module):
    """SwiGLU(x) = (silu(x W_gate) * x W_up) W_down   (Section 2.2 of the paper)"""

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        width = config.mlp_width or full_width(C)
        if config.mlp_width is None and ATTENTION[config.attn].second_queries:
            width = matched_width(C, config.n_head)
        self.gate_proj = nn.Linear(C, width, bias=False)
        self.up_proj = nn.Linear(C, width, bias=False)
        self.down_proj = nn.Linear(width, C, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and then the MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config, depth):
        super().__init__()
        # the order also says in which order the gradient norm is summed, so to the last digit
        self.attn = ATTENTION[config.attn](config, depth)
        self.norm1 = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        self.norm2 = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        self.mlp = MLP(config)

    def forward(self, x, rope, state=None, room=None):
        x = x + self.attn(self.norm1(x), rope, state, room)
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    """The whole model. model(idx) and model(idx, targets) give (logits, loss), see forward.

    idx and targets are (B, T) int64. T may be anything, even more than block_size.
    seed: the weights are drawn from it, on the CPU. None leaves them as PyTorch's layers have them.
    """

    def __init__(self, config, seed=1337):
        super().__init__()
        self.config = config
        self.extra = {}  # GPT.load puts here what was saved with the model
        padded_vocab = math.ceil(config.vocab_size / 64) * 64  # GPUs like multiples of 64
        # what a class draws for itself must not depend on the global random generator, nor move it
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed or 0)
            self.wte = nn.Embedding(padded_vocab, config.n_embd)
            self.blocks = nn.ModuleList(Block(config, depth) for depth in range(config.n_layer))
            self.norm = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        if seed is not None:
            draw_parameters(self, seed)

    def rope_from(self, start, T):
        """The Rope of T tokens from position `start` on, for all layers."""
        weight = self.wte.weight
        position = start + torch.arange(T, device=weight.device)
        return make_rope(position, self.config, wide_dtype(weight))

    def read(self, idx, start=0, layer_states=None, room=None):
        """The residual stream behind all blocks, (B, T, C), for tokens from position start on."""
        x = self.wte(idx)  # (B, T, C)
        rope = self.rope_from(start, idx.shape[1])  # one table for all layers
        for i, block in enumerate(self.blocks):
            x = block(x, rope, layer_states[i] if layer_states else None, room)
        return x

    def logits(self, x):
        """(B, T, C) to (B, T, vocab_size). The output layer is the embedding (tied weights)."""
        logits = F.linear(self.norm(x), self.wte.weight)
        return logits[..., : self.config.vocab_size]

    def forward(self, idx, targets=None):
        """With targets: the logits (B, T, vocab_size), detached, and the mean loss in nats.

        Without targets: the logits of the last token alone, (B, 1, vocab_size), and None.
        """
        x = self.read(idx)
        if targets is None:
            return self.logits(x[:, -1:]), None
        logits = self.logits(x)
        loss = F.cross_entropy(upcast(logits).flatten(0, 1), targets.flatten())
        # nobody needs a gradient of these logits, and with it the caller would keep the whole graph
        return logits.detach(), loss

    def prefill(self, idx, room=None):
        """Read a prompt (B, T): its last logits, (B, 1, vocab_size), and the state for `step`.

        The state holds "length", the tokens so far, and "layers", a dict of tensors for each layer.
        room: the tokens, prompt included, that the cache of the softmax arms can hold. A step reads
        all of it. The default is block_size. They raise ValueError for a longer prompt.
        """
        state = {
            "length": torch.tensor([idx.shape[1]], device=idx.device),
            "layers": [{} for _ in self.blocks],
        }
        x = self.read(idx, 0, state["layers"], room)
        # tell torch.compile that these tensors stay where they are, since the steps write to them
        # in place: a CUDA graph of a step needs fixed addresses. guard=False: don't compile anew
        # for the state of another prompt
        tensors = [state["length"]]
        for layer_state in state["layers"]:
            tensors.extend(layer_state.values())
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor, guard=False)
        return self.logits(x[:, -1:]), state

    def step(self, idx, state):
        """Read one more token, idx (B, 1): the logits after it, (B, 1, vocab_size).

        The state is updated in place. Call it and prefill under torch.inference_mode(), or the
        state keeps the graph of all steps.
        """
        x = self.read(idx, state["length"], state["layers"])
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
        """Yields the next token of each row of idx (B, T), (B,) int64, max_new_tokens times.

        temperature: 0 takes the likeliest token. top_k: choose among the k likeliest only.
        top_p: choose among the fewest that together reach this probability. step: self.step,
        compiled. Raises ValueError for options that make no sense.
        """
        if not temperature >= 0:
            raise ValueError(f"temperature must be 0 or more, not {temperature}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be 1 or more, not {top_k}")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {top_p}")
        # the body of a Python generator starts at the first next(). So it is a function of its own,
        # and what is wrong with the options is said at the call
        options = dict(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        return self._generate(idx, max_new_tokens, options, step or self.step)

    @torch.inference_mode()
    def _generate(self, idx, max_new_tokens, options, step):
        # linear attention's state has room for any number of tokens. Softmax's cache gets as much
        # as the whole text needs, and a block at the most
        room = math.inf
        if isinstance(self.blocks[0].attn, Softmax):
            room = min(self.config.block_size, idx.shape[1] + max_new_tokens)
            idx = idx[:, -room:]
        logits, state = self.prefill(idx, room)
        tokens = list(idx.split(1, dim=1))  # all that the state stands for, (B, 1) each
        for made in range(1, max_new_tokens + 1):
            token = next_token(logits[:, -1], **options)  # (B, 1)
            yield token[:, 0]
            if made == max_new_tokens:
                return
            # now read that token. In most cases it is a step
            if room < math.inf:
                tokens.append(token)
            if len(tokens) > room:
                # the cache is full: read the newer half of the text anew. It would not be enough to
                # drop the keys of the oldest tokens: the keys that deeper layers computed for later
                # tokens depend on them, too
                tokens = tokens[-max(1, room // 2) :]
                logits, state = self.prefill(torch.cat(tokens, dim=1), room)
            else:
                logits = step(token, state)

    def save(self, path, **extra):
        """Write the model and extra (tensors and plain values) to path. Raises OSError if it can't.

        If the program is killed at any point, the file at path is the old one or the whole new one.
        """
        temporary = Path(f"{path}.tmp")
        content = dict(config=asdict(self.config), model=self.state_dict(), **extra)
        try:
            with open(temporary, "wb") as f:
                torch.save(content, f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        except (OSError, RuntimeError) as e:  # torch.save raises the latter when the disk is full
            temporary.unlink(missing_ok=True)
            reason = str(e).splitlines()[0]
            raise OSError(f"{path} could not be written, is the disk full? ({reason})") from None

    @classmethod
    def load(cls, path, device="cpu", **overrides):
        """The model that save() wrote, on device. Whatever was saved with it is in its .extra.

        overrides: settings that leave the function as it is, like flash or kernel. Runs no code
        from the file. Raises OSError for a file that can't be read, and ValueError for one that is
        damaged, or not ours, or holds a model that this file can't build.
        """
        open(path, "rb").close()  # an OSError for a file that is missing or not readable
        try:
            if zipfile.ZipFile(path).testzip() is not None:
                raise ValueError("a checksum is wrong")
            extra = torch.load(path, map_location="cpu", weights_only=True)
            settings = extra.pop("config") | overrides
            weights = extra.pop("model")
            model = cls(GPTConfig(**settings), seed=None)
            model.load_state_dict(weights)
            if not all(p.isfinite().all() for p in model.parameters()):
                raise ValueError("some weights are not finite")
        except Exception as e:  # a dozen classes of errors, depending on what is wrong
            reason = " ".join(str(e).split())
            raise ValueError(f"{path} is no model that model.py can load: {reason:.160}") from None
        model.extra = extra
        return model.to(device)


@torch.no_grad()
def draw_parameters(model, seed):
    """Give the parameters that model.py knows by name their first values: a constant, or N(0, std).

    Each has a random generator of its own, seeded by the seed and its name. So a parameter that two
    arms share starts with the same bits in both. Other parameters keep what their class gave them.
    """
    config = model.config
    for name, p in model.named_parameters():
        kind = name.removesuffix(".weight").split(".")[-1]  # like "q_proj", "lambda_q1", "norm1"
        if kind in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            std = 0.1
        elif kind == "wte" and config.embd_init is not None:
            std = config.embd_init
        elif kind == "wte" or kind.endswith("_proj"):
            # what PyTorch gives nn.Linear. With 768 inputs it is GPT-2's 0.02. With 128 inputs 0.02
            # would be too small: the scores would start near 0, and every map flat
            fan_in = p.shape[-1]
            std = 1 / math.sqrt(3 * fan_in)
        else:  # the weight of a norm, which has its constant already, or what is not ours
            continue
        if kind in ("out_proj", "down_proj"):  # these add up in the residual stream, as in GPT-2
            std /= math.sqrt(2 * config.n_layer)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
        p.copy_(torch.randn(p.shape, generator=generator) * std)


def next_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Choose the next token, (B, 1) int64, by the logits (B, vocab_size). See GPT.generate."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    temperature = max(temperature, 1e-6)  # with less the logits would overflow
    probs = F.softmax(upcast(logits) / temperature, dim=-1)
    if top_k is None and top_p is None:
        return draw(probs, generator)

    # the likeliest tokens first. Then set the others to 0
    probs, tokens = probs.sort(descending=True)
    if top_k is not None:
        probs[:, top_k:] = 0
    if top_p is not None:
        total = probs.cumsum(-1)
        before = total - probs  # the probability of all likelier tokens together
        probs[before >= top_p * total[:, -1:]] = 0
    return tokens.gather(-1, draw(probs, generator))  # probs need not sum to 1


def draw(probs, generator):
    """A column drawn from each row of probs, (B, 1) int64. They are weights of any sum.

    It is what torch.multinomial does for one draw, but without its checks, which wait for the GPU.
    """
    noise = torch.empty_like(probs).exponential_(generator=generator)
    return (probs / noise).argmax(-1, keepdim=True)


@torch.compiler.assume_constant_result
def on_hopper(device_type):
    """Whether the GPU is an H100 or H200."""
    return device_type == "cuda" and torch.cuda.get_device_capability() == (9, 0)


def fused_attention(q, k, v, rate):
    """softmax(q k^T / sqrt(d) + log D) v without the map, by PyTorch. Returns (B, H, T, d_v).

    q, k (B, H, T, d), v (B, h, T, d_v). rate is -log gamma, (H, 1, 1), or None without decay. With
    decay, log D is a matrix in memory of H T^2 numbers: for 12 heads in bf16 25 MB at T = 1,024 and
    6.4 GB at T = 16,384. Raises ValueError where no fused kernel runs.
    """
    T, d = q.shape[2:]
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # (B, H, T, d_v): a copy a branch
    # MATH is in neither list. It would hold the whole map, and PyTorch would take it in silence
    if on_hopper(q.device.type):
        # both take d_v = 2d as it is
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    else:
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        q, k = pad_to(v.shape[-1], q, k)
    log_D = None
    if rate is not None:
        log_D = log_mask(rate, distances(T, q.device)).to(q.dtype)[None]  # (1, H, T, T)
    try:
        with sdpa_kernel(backends, set_priority=True):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=log_D, is_causal=log_D is None, scale=d**-0.5
            )
    except RuntimeError as e:
        if not str(e).startswith(("No available kernel", "No viable backend")):  # CUDA's, the CPU's
            raise
        what = f"{q.dtype} heads of {d} channels on {q.device.type}"
        raise ValueError(f"no fused kernel for {what}: use --no-flash, the map form") from e


def pad_to(width, *tensors):
    """The tensors with zeros up to that many channels. Zeros change no product q . k."""
    return [F.pad(x, (0, width - x.shape[-1])) for x in tensors]


def flash_attention(q, k, v, rate):
    """fused_attention by the package flash-attn, which needs no D in memory. Not yet measured."""
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        message = "--kernel=flash_attn needs the package flash-attn, see requirements.txt"
        raise ValueError(message) from None
    d = q.shape[-1]
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    q, k = pad_to(v.shape[-1], q, k)
    # ALiBi (2108.12409) adds the same log D = -rate (i - j) to the scores. Its slopes are our rates
    slopes = None if rate is None else rate.flatten().float()
    y = flash_attn_func(
        q.transpose(1, 2),  # (B, T, H, d_v), like k and v
        k.transpose(1, 2),
        v.transpose(1, 2),
        softmax_scale=d**-0.5,
        causal=True,
        alibi_slopes=slopes,
    )
    return y.transpose(1, 2)


def pick_device(name=None):
    """The device of that name, by default a GPU where there is one. ValueError if it can't work."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        one = torch.ones(1, device=name)
        one.item()  # "meta" is a device without values
        return one.device
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        first_line = str(e).split("\n")[0]
        raise ValueError(f"can't use the device {name}: {first_line}") from None


def pick_dtype(device, name=None):
    """The precision of the matmuls: name, or else bfloat16 where the card has it, and float32."""
    if name is not None:
        return name
    # cards older than Ampere only emulate bf16
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if bf16 else "float32"


def round_to_bf16(model):
    """Cast the weights to bf16, for sampling. But not the lambda vectors: exp is sensitive."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding, nn.RMSNorm)):
            module.bfloat16()


def demo():
    """The tutorial's example in numbers, and for each arm how well its three forms agree."""
    A_1 = F.softmax(torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0]), dim=-1)
    A_2 = F.softmax(torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]), dim=-1)
    U = torch.full((5,), 1 / 5)
    print("what the last of five tokens takes from each. Only the second one matters")
    rows = {"A_1": A_1, "A_2": A_2, "A_1 - 0.6 A_2": A_1 - 0.6 * A_2}
    rows |= {"U, the average": U, "A_1 - 0.7 U": A_1 - 0.7 * U}
    for name, row in rows.items():
        share = row[1].abs() / row.abs().sum()
        numbers = "".join(f"{a:7.2f}" for a in row)
        print(f"{name:16}{numbers}   the second one has {share:.0%} of the weight")

    x = torch.randn(1, 200, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    print("\nthe largest difference between the three forms, in float64")
    arms = [dict(attn=attn) for attn in ATTENTION]
    arms += [dict(attn=attn, minus_average=True) for attn in ("softmax", "linear")]
    for arm in arms:
        model = GPT(GPTConfig(n_layer=1, n_head=4, n_embd=64, **arm)).double()
        by_map = GPT(GPTConfig(n_layer=1, n_head=4, n_embd=64, flash=False, **arm)).double()
        fast = model.blocks[0].attn(x)
        map_error = (fast - by_map.blocks[0].attn(x)).abs().max()
        state = {}
        steps = []
        for t in range(200):
            steps.append(model.blocks[0].attn(x[:, t : t + 1], model.rope_from(t, 1), state))
        step_error = (fast - torch.cat(steps, dim=1)).abs().max()
        name = arm["attn"] + (" minus the average" if "minus_average" in arm else "")
        print(f"{name:26} |fast - map| {map_error:.0e}   |fast - steps| {step_error:.0e}")


if __name__ == "__main__":
    demo()
