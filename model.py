"""
Seven kinds of attention ("arms") in one GPT.

                        one map     one map minus       the difference
                                    the average         of two maps
    exp as weights      softmax     softmax_average     diff, diff_v2
    features            linear      linear_average      diff_linear

    diff        Differential Transformer, arXiv 2410.05258. Below it is "the paper", and Eq. 1 to 3
                are its equations
    diff_v2     its authors' second version, see DiffV2
    linear      Transformers are RNNs, arXiv 2006.16236

Attention multiplies the values V by a causal T x T matrix A, which we call the map: row i says how
much token i takes from each token j <= i. Every map is made of weights w, a mask D and a divisor z:

    A_ij = w_ij D_ij / z_i

    softmax     w_ij = exp((R_i q_i) . (R_j k_j) / sqrt(d))
                z_i = sum over j of w_ij D_ij
    linear      w_ij = (R_i phi(q_i)) . (R_j phi(k_j))
                z_i = sum over j of phi(q_i) . phi(k_j) D_ij

    R_i     the rotary embedding, a rotation that depends on the position i. In softmax z is the sum
            of the row. In linear attention it is that sum without the rotation, see linear_map
    phi     a feature map, all of whose values are positive
    D_ij    1 for j <= i, and 0 for the future

A differential arm has the difference of two maps, A = A_1 - lambda A_2, with a learned lambda. One
map gives some weight to all tokens, also to those that don't matter. The difference takes away what
the two maps have in common, as far as lambda goes.

The next part computes four of the arms in the simplest way. All that follows makes them fast, and
puts a GPT around them. Letters in the comments on shapes:

    B batch, T time (tokens), C channels (n_embd)
    H maps, each with queries of its own, d channels each
    h heads of values, d_v channels each: h = H, or H/2 where two maps share a value
"""
import hashlib
import math
import os
import zipfile
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple, get_args

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

NORM_EPS = 1e-5  # of every RMSNorm
ROW_SUM_EPS = 1e-12  # keeps the sum of a linear row from being exactly zero
CHUNK = 64  # tokens in a chunk of linear attention's fast form


class ModelError(ValueError):
    """A mistake of whoever uses a model, not of the code. The message says what to do."""


# ---- the maps. Their helpers phi, rotate, make_rope and upcast stand at the end of this part


def softmax_map(q, k, log_D):
    """A = softmax(q k^T / sqrt(d) + log D), (B, H, T, T). q, k (B, H, T, d), rotated.

    log D is the mask, (T, T): 0 for the past (without decay), and -inf for the future. F.softmax is
    exp and the division by z in one call, so the mask goes into the exponent.
    """
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return F.softmax(upcast(scores) + log_D, dim=-1)


def linear_map(q, k, rope, log_D):
    """A_ij = (R_i q_i) . (R_j k_j) D_ij / z_i, (B, H, T, T). q, k (B, H, T, d) are features, phi.

    Only the numerator is rotated, so z is a sum of positive numbers (RoFormer, arXiv 2104.09864,
    Section 3.3). But entries of the map may be negative, and a row need not sum to 1.
    """
    D = log_D.exp()
    z = (upcast(q @ k.mT) * D).sum(-1, keepdim=True) + ROW_SUM_EPS  # (B, H, T, 1)
    return upcast(rotate(q, rope) @ rotate(k, rope).mT) * D / z


def attention(layer, x, kind):
    """A whole layer without options, x (B, T, C) to (B, T, C).

    kind: softmax, linear, diff or diff_linear. layer: one of the classes below, for its parameters.
    A test checks that the class computes the same.
    """
    T = x.shape[1]
    H = layer.config.n_head
    rope = make_rope(torch.arange(T, device=x.device), layer.config, x.dtype)
    log_D = torch.full((T, T), -math.inf, device=x.device).triu(1)  # 0 on and below the diagonal
    q = layer.q_proj(x).unflatten(-1, (H, -1)).transpose(1, 2)  # (B, H, T, d)
    k = layer.k_proj(x).unflatten(-1, (H, -1)).transpose(1, 2)  # (B, H, T, d)
    if kind in ("softmax", "diff"):
        A = softmax_map(rotate(q, rope), rotate(k, rope), log_D)  # (B, H, T, T)
    else:
        A = linear_map(phi(q), phi(k), rope, log_D)

    if kind in ("softmax", "linear"):
        v = layer.v_proj(x).unflatten(-1, (H, -1)).transpose(1, 2)  # (B, H, T, d)
        y = A @ v
    else:
        # the heads 2n and 2n+1 are the two maps of one head, whose values are twice as wide
        v = layer.v_proj(x).unflatten(-1, (H // 2, -1)).transpose(1, 2)  # (B, H/2, T, 2d)
        lambda_1 = torch.exp(layer.lambda_q1 @ layer.lambda_k1)
        lambda_2 = torch.exp(layer.lambda_q2 @ layer.lambda_k2)
        lam = lambda_1 - lambda_2 + layer.lambda_init  # Eq. 2
        A = A[:, 0::2] - lam * A[:, 1::2]  # Eq. 1, (B, H/2, T, T)
        y = A @ v
        y = layer.subln(y) * (1 - layer.lambda_init)  # Eq. 3
    return layer.out_proj(y.transpose(1, 2).flatten(2))  # the heads side by side


def phi(x):
    """elu(x) + 1 (arXiv 2006.16236, Eq. 7), written so that bf16 keeps its small values.

    For x below -7, elu(x) in bf16 is exactly -1, so elu(x) + 1 would be 0.
    """
    return F.relu(x) + torch.exp(x.clamp(max=0))


class Rope(NamedTuple):
    """The positions of tokens, (T,) int64, and the cosines and sines of their angles, (T, d/2)."""

    position: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def rotate(x, rope):
    """Turn each pair of neighbouring channels of x (B, H, T, d) by its angle (RoFormer, Eq. 34)."""
    x_even, x_odd = x.unflatten(-1, (-1, 2)).unbind(-1)  # (B, H, T, d/2) each
    even = x_even * rope.cos - x_odd * rope.sin  # the cosines make it float32 if x is bf16
    odd = x_even * rope.sin + x_odd * rope.cos
    return torch.stack((even, odd), dim=-1).flatten(-2).to(x.dtype)


def make_rope(position, config, dtype):
    """The Rope of positions m: the angles are m theta^(-2i/d). It is in float32 or wider."""
    d = config.n_embd // config.n_head
    # in float64, because the angles of late positions are large, and float32 would round them.
    # Apple's GPUs have no float64, so for them we compute on the CPU (untested: we have no Mac)
    device = "cpu" if position.device.type == "mps" else position.device
    i = torch.arange(d // 2, device=device, dtype=torch.float64)
    frequency = config.rope_theta ** (-2 * i / d) if config.rope_theta else torch.zeros_like(i)
    angle = position.to(device)[:, None] * frequency  # (T, d/2)
    # stacked they are one table in memory. Else torch.compile would put the cosines into every
    # kernel that uses them, and compute them anew for each head: training took 1.5 times as long
    table = torch.stack((angle.cos(), angle.sin()))
    table = table.to(torch.promote_types(dtype, torch.float32)).to(position.device)
    cos, sin = table.unbind()
    return Rope(position, cos, sin)


def upcast(x):
    """x in float32 if it is bf16 or fp16, for sums and differences that those would round away.

    float64 stays float64.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---- the layers. Each kind of attention is written in three forms, and a test compares them:
#
#     the map         A itself, O(T^2), as above. To look at, and to test
#     the fast form   A V without A: softmax in a fused kernel, linear attention in chunks of
#                     tokens. To train
#     the step        one token at a time, with a state: softmax keeps the keys and values of all
#                     tokens so far, linear attention a matrix of fixed size. To sample


class Attention(nn.Module):
    """What all kinds share. layer(x) takes (B, T, C) to (B, T, C), layer.map(x) is (B, h, T, T).

    A new kind of attention needs its maps only, and a line in ATTENTION:

        class Mine(Attention):
            def maps(self, q, k, rope, log_D):  # q and k are not rotated yet
                ...

    Here fast, prefill and step, which train and sample, are computed from the map: that is slow,
    but right. Softmax and Linear have faster ones of their own. A class that changes the maps of
    those has to change these three as well. train.py calls check_forms to find out.

    The parameters have the names and shapes of Microsoft's release, whose num_heads is our h:
    https://github.com/microsoft/unilm/tree/master/Diff-Transformer
    """

    branches = 1  # maps for each head of values: 2 in a difference
    heads_per_value = 1  # n_head / heads of values: 2 if n_head counts the maps, as in Difference
    subln_by_default = False
    fixed_state = False  # whether the state has the same size for any number of tokens

    def __init__(self, config, depth):
        super().__init__()
        C = config.n_embd
        self.config = config
        self.head_dim = C // config.n_head
        self.n_value_head = config.n_head // self.heads_per_value
        self.mlp_width = full_width(C)  # of the MLP beside this layer

        # queries, keys and values of all heads side by side, and the projection of the output
        self.q_proj = nn.Linear(C, C, bias=False)
        self.k_proj = nn.Linear(C, C, bias=False)
        self.v_proj = nn.Linear(C, C, bias=False)
        self.out_proj = nn.Linear(C, C, bias=False)

        self.lambda_init = 0.0  # then the factor of Eq. 3 is 1
        self.make_lambda(depth)
        self.subln = None
        if config.subln or (config.subln is None and self.subln_by_default):
            # the heads share one weight
            self.subln = nn.RMSNorm(C // self.n_value_head, eps=NORM_EPS)
            nn.init.constant_(self.subln.weight, config.subln_init)

    def make_lambda(self, depth):
        """Makes the parameters of lambda. With one map there are none."""

    def lambda_full(self):
        """lambda, if the layer has one number for all tokens. Else None."""
        return None

    def project(self, x):
        """The queries, keys and values of x (B, T, C), and lambda, or None if there is no minus."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H, T, d)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H, T, d)
        v = self.v_proj(x).unflatten(-1, (self.n_value_head, -1)).transpose(1, 2)  # (B, h, T, d_v)
        return q, k, v, self.lambda_full()

    def forward(self, x, rope=None):
        """(B, T, C) to (B, T, C). rope: the Rope of x. Without one x starts at position 0."""
        if rope is None:
            rope = make_rope(torch.arange(x.shape[1], device=x.device), self.config, x.dtype)
        q, k, v, lam = self.project(x)
        if self.config.flash:
            y = self.fast(q, k, v, lam, rope)  # (B, h, T, d_v)
        else:
            y = self.by_map(q, k, v, lam, rope)
        return self.output(y)

    def output(self, y):
        """The outputs of the heads, y (B, h, T, d_v), side by side and projected: (B, T, C)."""
        if self.subln is not None:
            # in the dtype of the weight. Else nn.RMSNorm warns, and takes a slower path
            y = self.subln(y.type_as(self.subln.weight))
            # Eq. 3. The paper's reason for the factor: gradients then flow as in a Transformer with
            # one map, so that its settings can be kept
            y = y * (1 - self.lambda_init)
        y = y.transpose(1, 2).flatten(2)
        return self.out_proj(y.to(self.out_proj.weight.dtype))

    # the map

    def maps(self, q, k, rope, log_D):
        """The maps of all branches, (B, H, T, T)."""
        raise NotImplementedError(f"{type(self).__name__} has no maps")

    def attention_map(self, q, k, lam, rope):
        """A, (B, h, T, T)."""
        distance = rope.position[:, None] - rope.position  # below 0 in the future
        log_D = log_mask(self.decay_rate(q), distance)  # (H, T, T)
        return self.subtract(self.maps(q, k, rope, log_D), lam)

    def subtract(self, y, lam):
        """Eq. 1, of maps or of outputs: branch 1 minus lambda times branch 2, (B, h, ...)."""
        if lam is None:
            return y  # there is nothing to subtract
        y = upcast(y)  # a difference of two nearly equal numbers
        return y[:, 0::2] - lam * y[:, 1::2]

    def map(self, x):
        """The map of x (B, T, C), (B, h, T, T). Best in float32: bf16 rounds large scores."""
        rope = make_rope(torch.arange(x.shape[1], device=x.device), self.config, x.dtype)
        q, k, _, lam = self.project(x)
        return self.attention_map(q, k, lam, rope)

    def by_map(self, q, k, v, lam, rope):
        """A V by way of A, (B, h, T, d_v)."""
        return self.attention_map(q, k, lam, rope).to(v.dtype) @ v

    # the other two forms, for a kind of attention that has nothing better

    def fast(self, q, k, v, lam, rope):
        """A V, (B, h, T, d_v)."""
        return self.by_map(q, k, v, lam, rope)

    def prefill(self, x, rope, room):
        """The state after the tokens x (B, T, C), a dict of tensors with room for `room` tokens."""
        # copies of the last token keep the places of those that are not there yet
        later = x[:, -1:].expand(-1, room - x.shape[1], -1)
        return {"x": torch.cat((x, later), dim=1)}

    def step(self, x, rope, state):
        """(B, 1, C) to (B, 1, C): one more token, at the position of rope. It changes the state."""
        state["x"].index_copy_(1, rope.position, x)
        # compute all tokens anew. What stands behind this one changes nothing: attention is causal
        return self(state["x"]).index_select(1, rope.position)

    # decay

    def decay_rate(self, x):
        """-log gamma = 1/span of each map, (H, 1, 1), in float32 or wider. Without decay it is 0.

        With decay the mask is D_ij = gamma^(i - j), so that a head forgets: after `span` tokens a
        weight has faded to 1/e. The spans of the h heads go from 4 tokens to 2 block_size, evenly
        in log. A single head gets the middle of that range. Both branches of a head have the same
        span, or DiffLinear could not fold them. For softmax this is ALiBi (arXiv 2108.12409), for
        linear attention it is RetNet's retention (arXiv 2307.08621).
        """
        h = self.n_value_head
        dtype = torch.promote_types(x.dtype, torch.float32)
        if not self.config.decay:
            return torch.zeros(h * self.branches, 1, 1, device=x.device, dtype=dtype)
        log_shortest = math.log2(4)
        log_longest = math.log2(2 * self.config.block_size)
        if h == 1:
            log_shortest = log_longest = (log_shortest + log_longest) / 2
        log_span = torch.linspace(log_shortest, log_longest, h, device=x.device, dtype=dtype)
        return torch.exp2(-log_span).repeat_interleave(self.branches)[:, None, None]


def log_mask(rate, distance):
    """log D: -rate * distance for the past, -inf for the future (distance < 0).

    rate is -log gamma of each head, (H, 1, 1), and distance i - j is (rows, columns). Returns (H,
    rows, columns). It is never above 0, so no power of gamma overflows.
    """
    return (-rate * distance).masked_fill(distance < 0, -math.inf)


class Softmax(Attention):
    """A = softmax(Q K^T / sqrt(d) + log D)"""

    def maps(self, q, k, rope, log_D):
        return softmax_map(rotate(q, rope), rotate(k, rope), log_D)

    def fast(self, q, k, v, lam, rope):
        """A V in a fused kernel, which does not hold A.

        With two branches it is A_1 V - lambda A_2 V. With decay, log D is a matrix in memory of H
        T^2 numbers: for 12 heads in bf16 25 MB at T = 1,024 and 6.4 GB at T = 16,384.
        """
        d = q.shape[-1]
        q = rotate(q, rope)
        k = rotate(k, rope)
        v = v.repeat_interleave(self.branches, dim=1)  # (B, H, T, d_v): a copy for each branch
        rate = self.decay_rate(q) if self.config.decay else None
        if self.config.kernel == "flash_attn":
            return self.subtract(flash_attention(q, k, v, rate), lam)

        log_D = None
        if rate is not None:
            distance = rope.position[:, None] - rope.position
            log_D = log_mask(rate, distance).to(q.dtype)[None]  # (1, H, T, T)
        # without such a list PyTorch may silently take its MATH backend, which holds the whole map
        if q.is_cuda and torch.cuda.get_device_properties(q.device).major == 9:
            # an H100 or H200. Both of these take values that are wider than the keys
            backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        else:
            backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
            # zeros change no product q . k
            q = F.pad(q, (0, v.shape[-1] - d))
            k = F.pad(k, (0, v.shape[-1] - d))
        try:
            with sdpa_kernel(backends, set_priority=True):
                y = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=log_D, is_causal=log_D is None, scale=d**-0.5
                )  # (B, H, T, d_v)
        except RuntimeError as e:
            # so the message begins on CUDA and on the CPU
            if not str(e).startswith(("No available kernel", "No viable backend")):
                raise
            what = f"{q.dtype} heads of {d} channels on {q.device.type}"
            raise ModelError(f"no fused kernel for {what}: use --no-flash, the map form") from e
        return self.subtract(y, lam)

    def prefill(self, x, rope, room):
        """The cache of keys and values, with all of its room, so that all steps have one shape."""
        _, k, v, _ = self.project(x)
        free = room - x.shape[1]
        keys = F.pad(rotate(k, rope), (0, 0, 0, free))  # (B, H, room, d)
        values = F.pad(v, (0, 0, 0, free))  # (B, h, room, d_v)
        return {"k": keys, "v": values}

    def step(self, x, rope, state):
        """The last row of the map. log D hides the part of the cache that is not filled yet."""
        q, k, v, lam = self.project(x)
        # a position beyond the cache is an IndexError, on CUDA a failed assertion of the device
        state["k"].index_copy_(2, rope.position, rotate(k, rope))
        state["v"].index_copy_(2, rope.position, v)
        room = state["k"].shape[2]
        distance = rope.position[:, None] - torch.arange(room, device=x.device)  # (1, room)
        log_D = log_mask(self.decay_rate(q), distance)  # (H, 1, room)
        # scores in float32, as the fused kernels have them
        with torch.autocast(x.device.type, enabled=False):
            A = softmax_map(upcast(rotate(q, rope)), upcast(state["k"]), log_D)  # (B, H, 1, room)
        # the branches of a head read the same values: one matmul serves both, with a row for each
        A = A.squeeze(2).unflatten(1, (-1, self.branches))  # (B, h, branches, room)
        y = A.to(v.dtype) @ state["v"]  # (B, h, branches, d_v)
        y = y.flatten(1, 2).unsqueeze(2)  # (B, H, 1, d_v)
        return self.output(self.subtract(y, lam))


class Linear(Attention):
    """A_ij = (R_i phi(q_i)) . (R_j phi(k_j)) D_ij / z_i, see linear_map."""

    fixed_state = True

    def phi(self, x):
        """The feature map, all of whose values must be positive. A subclass may have another."""
        return phi(x)

    def maps(self, q, k, rope, log_D):
        return linear_map(self.phi(q), self.phi(k), rope, log_D)

    def fold_q(self, q, lam, rope):
        """The queries of one attention that does the work of all branches. Here there is one."""
        return q

    def fold_k(self, k):
        """The keys that go with fold_q."""
        return k

    def fast(self, q, k, v, lam, rope):
        """A V in chunks. z_i is the same for all of row i, so we divide the query by it first.

        decayed_cumsum and chunkwise stand in the part on fast forms, below.
        """
        q = self.phi(q)
        k = self.phi(k)
        rate = self.decay_rate(q)
        key_sum = decayed_cumsum(k, rate)  # sum over j <= i of D_ij k_j, (B, H, T, d)
        z = (upcast(q) * key_sum).sum(-1, keepdim=True) + ROW_SUM_EPS  # (B, H, T, 1)
        q = self.fold_q(rotate(q, rope) / z, lam, rope)  # (B, h, T, f) with f features
        k = self.fold_k(rotate(k, rope))  # (B, h, T, f)
        return chunkwise(q, k, v, rate[:: self.branches])  # a rate for each head of values

    def prefill(self, x, rope, room):
        """S = sum of gamma^age k v^T with the folded keys, and Z = sum of gamma^age phi(k).

        Both stay in float32, since thousands of steps add to them. Their size is fixed.
        """
        _, k, v, _ = self.project(x)
        k = upcast(self.phi(k))
        age = torch.arange(x.shape[1] - 1, -1, -1, device=x.device)[:, None]  # the last has age 0
        fade = torch.exp(-self.decay_rate(k) * age)  # gamma^age, (H, T, 1)
        Z = (k * fade).sum(2, keepdim=True)  # (B, H, 1, d)
        k = self.fold_k(rotate(k, rope)) * fade[:: self.branches]  # (B, h, T, f)
        with torch.autocast(x.device.type, enabled=False):
            S = k.mT @ upcast(v)  # (B, h, f, d_v)
        return {"Z": Z, "S": S}

    def step(self, x, rope, state):
        """One step of a recurrent net (2006.16236, Eq. 18 to 20).

        Z <- gamma Z + phi(k), z = phi(q) . Z, S <- gamma S + k v^T, y = q S with q and k folded
        """
        q, k, v, lam = self.project(x)
        q = self.phi(q)
        k = self.phi(k)
        gamma = torch.exp(-self.decay_rate(q))
        state["Z"].mul_(gamma).add_(k)
        z = (q * state["Z"]).sum(-1, keepdim=True) + ROW_SUM_EPS  # (B, H, 1, 1)
        q = self.fold_q(rotate(q, rope) / z, lam, rope)  # (B, h, 1, f)
        k = self.fold_k(rotate(k, rope))  # (B, h, 1, f)
        state["S"].mul_(gamma[:: self.branches]).add_(upcast(k).mT * upcast(v))
        # q S as a product and a sum, since autocast would round a matmul to bf16
        y = (upcast(q).mT * state["S"]).sum(2, keepdim=True)  # (B, h, 1, d_v)
        return self.output(y)


class Difference:
    """A = A_1 - lambda A_2: what Diff, which is the paper's, and DiffLinear add to one map.

    The query heads 2n and 2n+1 are the two branches of value head n. So there are half as many
    heads of values, each twice as wide: h = H/2 and d_v = 2d. The projections are those of one map.
    lambda and the norm come on top.
    """

    branches = 2
    heads_per_value = 2
    subln_by_default = True

    def make_lambda(self, depth):
        """The four vectors of Eq. 2. depth counts layers from 0, where the paper counts from 1."""
        self.lambda_init = self.config.lambda_init
        if self.lambda_init is None:
            self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        # in a GPT draw_parameters overwrites these. They are for a layer that is used alone
        self.lambda_q1 = nn.Parameter(torch.randn(self.head_dim) * 0.1)
        self.lambda_k1 = nn.Parameter(torch.randn(self.head_dim) * 0.1)
        self.lambda_q2 = nn.Parameter(torch.randn(self.head_dim) * 0.1)
        self.lambda_k2 = nn.Parameter(torch.randn(self.head_dim) * 0.1)

    def lambda_full(self):
        """Eq. 2, one number for all heads of the layer. It starts near lambda_init."""
        # (a * b).sum() and not a @ b: autocast would compute the dot product in bf16
        dot_1 = (upcast(self.lambda_q1) * upcast(self.lambda_k1)).sum()
        dot_2 = (upcast(self.lambda_q2) * upcast(self.lambda_k2)).sum()
        return torch.exp(dot_1) - torch.exp(dot_2) + self.lambda_init


class Diff(Difference, Softmax):
    """A = softmax(Q_1 K_1^T / sqrt(d)) - lambda softmax(Q_2 K_2^T / sqrt(d))   (Eq. 1)"""


class DiffLinear(Difference, Linear):
    """A = A_1 - lambda A_2, two linear maps, which fold into one linear attention."""

    def fold_q(self, q, lam, rope):
        """The queries [q_1, -lambda q_2], (B, h, T, 2d), of one linear attention for both branches.

        Here q_1 and q_2 are features, rotated, and each divided by the z of its own branch. With
        the keys [k_1, k_2] the weights are q_1 . k_1 - lambda q_2 . k_2, which is the difference of
        the two maps, since both branches have the same D. So the difference of two linear maps is
        one linear attention with twice as many features, half of them with a minus. (Softmax can't
        do that: the exp of a sum is a product, not a sum.)
        """
        return torch.cat((q[:, 0::2], -lam * q[:, 1::2]), dim=-1)

    def fold_k(self, k):
        """The keys [k_1, k_2], (B, h, T, 2d)."""
        return torch.cat((k[:, 0::2], k[:, 1::2]), dim=-1)


class DiffV2(Softmax):
    """A = A_1 - lambda A_2, with A_n = softmax(Q_n K^T / sqrt(d)) and lambda_i = sigmoid(x_i W).

    The second version of the paper's authors: https://huggingface.co/blog/microsoft/diff-attn-v2, a
    blog post of January 2026. It differs from Diff in this:

    - Keys and values are softmax's, h heads of d channels. Each head gets a second query, so q_proj
      is C x 2C. The queries 2n and 2n+1 are the branches of head n.
    - Each token and head has a lambda of its own, and lambda_init is not used.
    - There is no norm on the heads' output (subln=True adds one), and no factor behind it.

    So a layer has C^2 + C h parameters more than softmax's, and the MLP beside it is narrower: the
    blocks differ by 3/2 C parameters at most, unless C is tiny.
    """

    branches = 2

    def __init__(self, config, depth):
        super().__init__(config, depth)
        C = config.n_embd
        self.q_proj = nn.Linear(C, 2 * C, bias=False)
        # for C (C + h) parameters more than softmax's. A unit of width has 3 C, in three matrices
        self.mlp_width = max(8, full_width(C) - round((C + config.n_head) / 3))

    def make_lambda(self, depth):
        self.lambda_proj = nn.Linear(self.config.n_embd, self.config.n_head, bias=False)

    def project(self, x):
        """lambda is (B, h, T, 1), between 0 and 1. It starts near 1/2."""
        q, k, v, _ = super().project(x)
        # both queries of a head meet the same key. We store each key twice: that is simple, and the
        # cache of the keys is twice as large as it has to be
        k = k.repeat_interleave(2, dim=1)
        lam = upcast(self.lambda_proj(x)).sigmoid().mT[..., None]
        return q, k, v, lam


class Average:
    """A - lambda U, one map minus the average. A control: what does a minus do by itself?

    U is the map that ignores its query: D over its row sums, so that U V is the mean of the values
    so far. lambda is one learned number.
    """

    def make_lambda(self, depth):
        self.lambda_average = nn.Parameter(torch.tensor(0.2))

    def lambda_full(self):
        return self.lambda_average


class SoftmaxAverage(Average, Softmax):
    """A query of zeros makes the map U, so this is a difference whose second query is 0.

    It is the plainest way, and not the fastest: the README has the running mean in three lines.
    """

    branches = 2

    def project(self, x):
        q, k, v, lam = super().project(x)
        q = torch.stack((q, torch.zeros_like(q)), dim=2).flatten(1, 2)  # (B, H, T, d), H = 2h
        return q, k.repeat_interleave(2, dim=1), v, lam


class LinearAverage(Average, Linear):
    """In the fold U is one more feature: the query has -lambda / n there, and every key has 1.

    n is the sum of row i of D: without decay it is the number of tokens so far.
    """

    def maps(self, q, k, rope, log_D):
        A = super().maps(q, k, rope, log_D)
        U = F.softmax(log_D, dim=-1).expand_as(A)  # D over its row sums
        return torch.stack((A, U), dim=2).flatten(1, 2)  # (B, 2h, T, T)

    def fold_q(self, q, lam, rope):
        n = (rope.position + 1).to(q.dtype)[:, None]  # (T, 1)
        if self.config.decay:
            rate = self.decay_rate(q)
            n = torch.expm1(-rate * n) / torch.expm1(-rate)  # a geometric series, (H, T, 1)
        minus = (-lam / n).expand(*q.shape[:-1], 1)
        return torch.cat((q, minus), dim=-1)

    def fold_k(self, k):
        return torch.cat((k, torch.ones_like(k[..., :1])), dim=-1)


ATTENTION = {
    "softmax": Softmax,
    "diff": Diff,
    "diff_v2": DiffV2,
    "softmax_average": SoftmaxAverage,
    "linear": Linear,
    "diff_linear": DiffLinear,
    "linear_average": LinearAverage,
}


def full_width(n_embd):
    """The width of an MLP: 8/3 n_embd, rounded down to a multiple of 8."""
    return max(8, 8 * n_embd // 3 // 8 * 8)


# ---- the GPT and its settings


def setting(default, help, **more):
    """A field of GPTConfig with its description.

    more: choices, the values that are allowed, and identity=False for a setting that does not
    change what the model computes.
    """
    return field(default=default, metadata=dict(help=help, **more))


@dataclass
class GPTConfig:
    """The settings of a model, by default GPT-2 small's sizes.

    Raises ModelError if there can be no such model.
    """

    attn: str = setting("softmax", "kind of attention, a name in ATTENTION")
    n_layer: int = setting(12, "blocks")
    n_head: int = setting(12, "heads; diff and diff_linear have half as many, twice as wide")
    n_embd: int = setting(768, "channels")
    # decay takes its spans from block_size, so a model can't be loaded with another one
    block_size: int = setting(1024, "tokens of a training sequence, and room in softmax's cache")
    vocab_size: int = 50257  # no flag: it is the tokenizer's
    mlp_width: int | None = setting(None, "channels in the MLP (8/3 n_embd; less for diff_v2)")
    rope_theta: float = setting(10000.0, "base of the rotary embedding's angles, 0 for none")
    flash: bool = setting(True, "attention in its fast form, or else as a map", identity=False)
    kernel: str = setting(
        "sdpa",
        "what softmax's fast form calls: PyTorch's kernels, or the package flash-attn",
        choices=["sdpa", "flash_attn"],
        identity=False,
    )
    decay: bool = setting(False, "heads forget, each at a rate of its own")
    subln: bool | None = setting(None, "RMSNorm on each head's output (in diff and diff_linear)")
    subln_init: float = setting(1.0, "initial weight of that norm")
    lambda_init: float | None = setting(None, "of diff and diff_linear (0.8 - 0.6 exp(-0.3 depth))")
    embd_init: float | None = setting(None, "initial std of the embedding (1 / sqrt(3 n_embd))")

    def __post_init__(self):
        for f in fields(GPTConfig):
            self.check_field(f, getattr(self, f.name))
        if self.attn not in ATTENTION:
            known = ", ".join(ATTENTION)
            hint = "an arm of another file is there once that file is imported"
            raise ModelError(f"attn must be one of {known}, not {self.attn!r} ({hint})")
        if self.n_head % ATTENTION[self.attn].heads_per_value != 0:
            raise ModelError(f"n_head must be even for {self.attn}, not {self.n_head}")
        # a head needs an even size: the rotary embedding turns pairs of channels
        if self.n_embd % (2 * self.n_head) != 0:
            raise ModelError(f"n_embd must be a multiple of {2 * self.n_head}, not {self.n_embd}")

    def check_field(self, f, value):
        """ModelError for a value of a wrong type or out of range: decay="no" would be true."""
        kinds = get_args(f.type) or (f.type,)  # of "int | None", int and NoneType
        if float in kinds:
            kinds = (*kinds, int)
        problem = None
        if type(value) not in kinds:
            names = " or ".join(kind.__name__ for kind in kinds).replace("NoneType", "None")
            problem = f"of type {names}"
        elif int in kinds and float not in kinds and value is not None and value < 1:
            problem = "at least 1"
        elif float in kinds and value is not None and not math.isfinite(value):
            problem = "finite"
        elif f.name == "rope_theta" and value < 0:
            problem = "0 or more"
        elif f.name == "lambda_init" and value is not None and value >= 1:
            problem = "below 1"  # or the factor of Eq. 3 would be 0
        elif f.name == "embd_init" and value is not None and value <= 0:
            problem = "above 0"
        elif value not in f.metadata.get("choices", [value]):
            problem = " or ".join(f.metadata["choices"])
        if problem is not None:
            raise ModelError(f"{f.name} must be {problem}, not {value!r}")


class MLP(nn.Module):
    """SwiGLU(x) = (silu(x W_gate) * x W_up) W_down   (Section 2.2 of the paper)"""

    def __init__(self, n_embd, width):
        super().__init__()
        self.gate_proj = nn.Linear(n_embd, width, bias=False)
        self.up_proj = nn.Linear(n_embd, width, bias=False)
        self.down_proj = nn.Linear(width, n_embd, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and then the MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config, depth):
        super().__init__()
        self.attn = ATTENTION[config.attn](config, depth)
        self.norm1 = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        self.norm2 = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        self.mlp = MLP(config.n_embd, config.mlp_width or self.attn.mlp_width)

    def forward(self, x, rope, state=None):
        """(B, T, C) to (B, T, C). With the state of its attention, x is one more token."""
        if state is None:
            x = x + self.attn(self.norm1(x), rope)
        else:
            x = x + self.attn.step(self.norm1(x), rope, state)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The whole model. model(idx) and model(idx, targets) give (logits, loss), see forward.

    idx and targets are (B, T) int64. T may be anything, even more than block_size.
    seed: the weights are drawn from it, on the CPU. None leaves them as PyTorch's layers have them.
    """

    def __init__(self, config, seed=1337):
        super().__init__()
        self.config = config
        self.extra = {}  # GPT.load puts here what was saved with the model
        padded_vocab = math.ceil(config.vocab_size / 64) * 64  # matmuls are faster so
        # what a class draws for itself must not depend on the global random generator, nor move it
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed or 0)
            self.wte = nn.Embedding(padded_vocab, config.n_embd)
            self.blocks = nn.ModuleList(Block(config, depth) for depth in range(config.n_layer))
            self.norm = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        if seed is not None:
            draw_parameters(self, seed)

    def embed(self, idx, start=0):
        """The tokens idx, from position start on: (B, T, C), and their Rope for all layers."""
        if idx.device.type == "cpu" and not torch.compiler.is_compiling():
            # the embedding is padded, so it would accept a few ids from vocab_size on. We check
            # where that costs no wait for a GPU
            if idx.numel() > 0 and idx.max() >= self.config.vocab_size:
                raise IndexError(f"token {idx.max()}: there are {self.config.vocab_size}")
        position = start + torch.arange(idx.shape[1], device=idx.device)
        return self.wte(idx), make_rope(position, self.config, self.wte.weight.dtype)

    def read(self, idx):
        """The residual stream after all blocks, (B, T, C)."""
        x, rope = self.embed(idx)
        for block in self.blocks:
            x = block(x, rope)
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
        room: the tokens, prompt included, that a state of limited size has to hold, by default
        block_size. Raises ValueError if the prompt is longer.
        """
        T = idx.shape[1]
        room = room or self.config.block_size
        if T > room and not self.blocks[0].attn.fixed_state:
            raise ValueError(f"{T} tokens don't fit into a cache of {room}")
        x, rope = self.embed(idx)
        layers = []
        for block in self.blocks:
            layers.append(block.attn.prefill(block.norm1(x), rope, room))
            x = block(x, rope)
        length = torch.tensor([T], device=idx.device)
        return self.logits(x[:, -1:]), {"length": length, "layers": layers}

    def step(self, idx, state):
        """Read one more token, idx (B, 1): the logits after it, (B, 1, vocab_size).

        The state is updated in place. Call it and prefill under torch.inference_mode(), or the
        state keeps the graph of all steps.
        """
        if idx.shape[1] != 1:
            raise ValueError(f"a step takes one token of each row, not {idx.shape[1]}")
        x, rope = self.embed(idx, state["length"])
        for block, layer_state in zip(self.blocks, state["layers"]):
            x = block(x, rope, layer_state)
        state["length"] += 1
        return self.logits(x)

    @torch.inference_mode()
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
        """Yields, max_new_tokens times, the next token of every row of idx (B, T): (B,) int64.

        temperature, top_k, top_p, generator: see next_token. step: a compiled self.step, to be used
        in its place.
        """
        if idx.shape[1] == 0:
            raise ModelError("the prompt has no tokens")
        # linear attention's state has room for any number of tokens. Softmax's cache gets as much
        # as the whole text needs, and a block at the most
        fixed_state = self.blocks[0].attn.fixed_state
        room = min(self.config.block_size, idx.shape[1] + max_new_tokens)
        tokens = idx if fixed_state else idx[:, -room:]  # the tokens that the state holds
        token = state = None
        for _ in range(max_new_tokens):
            if state is None:
                logits, state = self.prefill(tokens, room)
                if step is not None:
                    fix_addresses(state)
            else:
                logits = (step or self.step)(token, state)  # after the token that was chosen last
            token = next_token(logits[:, -1], temperature, top_k, top_p, generator)  # (B, 1)
            yield token[:, 0]
            if fixed_state:
                continue
            tokens = torch.cat((tokens, token), dim=1)
            if tokens.shape[1] > room:
                # the cache is full: read the newer half of the text anew. It would not be enough to
                # drop the keys of the oldest tokens: the keys that deeper layers computed for later
                # tokens depend on them, too
                tokens = tokens[:, -max(1, room // 2) :]
                state = None

    def save(self, path, **extra):
        """Write the model and extra (tensors and plain values) to path. Raises OSError if it can't.

        If the program is killed at any point, the file at path is the old one or the whole new one.
        """
        content = dict(config=asdict(self.config), model=self.state_dict(), **plain(extra))
        temporary = Path(f"{path}.tmp")
        try:
            with open(temporary, "wb") as f:
                torch.save(content, f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        except (OSError, RuntimeError, KeyboardInterrupt) as e:
            temporary.unlink(missing_ok=True)
            # torch.save makes a RuntimeError of a full disk, and of Ctrl-C
            if KeyboardInterrupt in (type(e), type(e.__context__)):
                raise KeyboardInterrupt from None
            reason = str(e).splitlines()[0]
            raise OSError(f"{path} could not be written, is the disk full? ({reason})") from None

    @classmethod
    def load(cls, path, device="cpu", **overrides):
        """The model that save() wrote, on device, in eval mode. What else was saved is in .extra.

        overrides: settings that leave the function as it is, like flash or kernel. Runs no code
        from the file. Raises OSError for a file that can't be read, and ModelError for one that is
        damaged, or not ours, or holds a model that this file can't build.
        """
        extra = read_checkpoint(path)
        settings = extra.pop("config")
        weights = extra.pop("model")
        unknown = settings.keys() - {f.name for f in fields(GPTConfig)}
        if unknown:
            raise ModelError(f"{path} has settings that this model.py lacks: {', '.join(unknown)}")
        for name in overrides:
            if GPTConfig.__dataclass_fields__[name].metadata.get("identity", True):
                raise ValueError(f"{name} can't be changed: it would be another model")
        try:
            config = GPTConfig(**settings | overrides)
        except ModelError as e:
            raise ModelError(f"{path}: {e}") from None
        model = cls(config, seed=None)
        try:
            model.load_state_dict(weights)
        except RuntimeError as e:
            raise ModelError(f"{path}: its weights don't fit {config.attn}: {e}") from None
        if not all(p.isfinite().all() for p in model.parameters()):
            raise ModelError(f"{path}: some weights are not finite")
        model.extra = extra
        return model.to(device).eval()


@torch.no_grad()
def draw_parameters(model, seed):
    """Draw the first values of the embedding, the lambda vectors, and all that is named ..._proj.

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
            # the std of PyTorch's nn.Linear. With 768 inputs it is GPT-2's 0.02. With 128 inputs
            # 0.02 would be too small: the scores would start near 0, and every map flat
            fan_in = p.shape[-1]
            std = 1 / math.sqrt(3 * fan_in)
        else:  # the weight of a norm, or a parameter of a class of yours
            continue
        if kind in ("out_proj", "down_proj"):  # these add up in the residual stream, as in GPT-2
            std /= math.sqrt(2 * config.n_layer)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
        p.copy_(torch.randn(p.shape, generator=generator) * std)


# ---- the fast form of linear attention, and the package flash-attn. For softmax see Softmax.fast


def to_chunks(x):
    """(B, H, T, f) to (B, H, N, CHUNK, f). Zeros fill the last chunk up."""
    padding = -x.shape[2] % CHUNK
    # contiguous, because torch.compile would fail where T is unknown to it and padding may be 0
    x = F.pad(x.contiguous(), (0, 0, 0, padding))
    return x.unflatten(2, (-1, CHUNK))


def distances(T, device):
    """i - j for all pairs of T tokens, (T, T): below 0 in the future."""
    i = torch.arange(T, device=device)
    return i[:, None] - i


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
    # q was divided by z in float32. If the model is in bf16, a matmul of q and k would be an error
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


def flash_attention(q, k, v, rate):
    """Softmax's A V by the package flash-attn, which needs no log D in memory. Not yet measured.

    q, k (B, H, T, d), v (B, H, T, d_v). rate is -log gamma, (H, 1, 1), or None without decay.
    """
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        message = "--kernel=flash_attn needs the package flash-attn, see requirements.txt"
        raise ModelError(message) from None
    d = q.shape[-1]
    q = F.pad(q, (0, v.shape[-1] - d))  # it takes one width only
    k = F.pad(k, (0, v.shape[-1] - d))
    y = flash_attn_func(
        q.transpose(1, 2),  # (B, T, H, d_v), like k and v
        k.transpose(1, 2),
        v.transpose(1, 2),
        softmax_scale=d**-0.5,
        causal=True,
        # ALiBi (2108.12409) adds the same log D = -rate (i - j) to the scores
        alibi_slopes=None if rate is None else rate.flatten().float(),
    )
    return y.transpose(1, 2)


# ---- the steps and sampling


def fix_addresses(state):
    """Tell torch.compile that the tensors of a state stay where they are.

    The steps write to them in place, and a CUDA graph of a step needs fixed addresses.
    """
    tensors = [state["length"]]
    for layer_state in state["layers"]:
        tensors.extend(layer_state.values())
    for tensor in tensors:
        # guard=False: don't compile anew for the state of another prompt
        torch._dynamo.mark_static_address(tensor, guard=False)


def next_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Choose the next token, (B, 1) int64, by the logits (B, vocab_size).

    temperature: 0 takes the likeliest token. top_k: choose among the k likeliest only. top_p:
    choose among the fewest that together reach this probability. Raises ModelError for options
    that make no sense.
    """
    if not temperature >= 0:
        raise ModelError(f"temperature must be 0 or more, not {temperature}")
    if top_k is not None and top_k < 1:
        raise ModelError(f"top_k must be 1 or more, not {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ModelError(f"top_p must be above 0 and at most 1, not {top_p}")
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    temperature = max(temperature, 1e-6)  # with less the logits would overflow
    probs = F.softmax(upcast(logits) / temperature, dim=-1)
    if top_k is None and top_p is None:
        return torch.multinomial(probs, 1, generator=generator)

    # the likeliest tokens first. Then set the others to 0
    probs, tokens = probs.sort(descending=True)
    if top_k is not None:
        probs[:, top_k:] = 0
    if top_p is not None:
        total = probs.cumsum(-1)
        before = total - probs  # the probability of all likelier tokens together
        probs[before >= top_p * total[:, -1:]] = 0
    choice = torch.multinomial(probs, 1, generator=generator)  # probs need not sum to 1
    return tokens.gather(-1, choice)


def round_to_bf16(model):
    """Cast the weights to bf16, for sampling. But not the lambda vectors: exp is sensitive."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding, nn.RMSNorm)):
            module.bfloat16()


# ---- saving


def plain(x):
    """x with Python's numbers in the place of numpy's, since read_checkpoint takes no others."""
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if isinstance(x, torch.Tensor) or x is None or type(x) in (bool, int, float, str):
        return x
    if hasattr(x, "item"):
        return x.item()
    raise TypeError(f"a checkpoint has room for tensors and plain values, not for {x!r}")


def read_checkpoint(path):
    """The dict that GPT.save wrote. It runs no code from the file."""
    if not os.path.isfile(path):
        open(path, "rb").close()  # an OSError that says what is wrong
        raise ModelError(f"{path} is no file")
    try:
        if zipfile.ZipFile(path).testzip() is not None:
            raise ValueError("a checksum is wrong")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # a dozen classes of errors, depending on how the file is damaged
        if isinstance(e, PermissionError):
            raise
        reason = " ".join(str(e).split())
        raise ModelError(f"{path} is damaged, or no checkpoint: {reason:.160}") from None
    for name in ("config", "model"):
        if not isinstance(content, dict) or not isinstance(content.get(name), dict):
            raise ModelError(f"{path} is a checkpoint of another program: it has no {name}")
    return content


# ---- do the three forms agree?


@torch.no_grad()
def compare_forms(config):
    """How far the other forms of a layer are from the one that training uses, on random input.

    {"map": ..., "steps": ...}, the largest difference of the outputs, where 1 is the largest
    output. "map" is missing for a class without maps. The input is as long as a training sequence,
    but not longer than 1,024 tokens.
    """
    T = min(config.block_size, 1024)
    config = replace(config, kernel="sdpa")  # we compare on the CPU, where flash-attn does not run
    with torch.random.fork_rng(devices=[]):  # a run must not depend on what is drawn here
        torch.manual_seed(0)
        layer = ATTENTION[config.attn](config, depth=0).eval()
        x = 3 * torch.randn(1, T, config.n_embd)  # so large that the maps are not flat
    rope = make_rope(torch.arange(T), config, x.dtype)
    y = layer(x)
    others = {}
    if type(layer).maps is not Attention.maps:
        others["map"] = layer.output(layer.by_map(*layer.project(x), rope))
    first = max(1, T // 2, T - 20)  # a prompt, and then a token at a time
    rope = make_rope(torch.arange(first), config, x.dtype)
    state = layer.prefill(x[:, :first], rope, room=T)
    rows = [layer(x[:, :first])]
    for t in range(first, T):
        rope = make_rope(torch.tensor([t]), config, x.dtype)
        rows.append(layer.step(x[:, t : t + 1], rope, state))
    others["steps"] = torch.cat(rows, dim=1)
    largest = y.abs().max().clamp(min=1e-12)  # with subln_init=0 all outputs are 0
    return {name: ((y - of).abs().max() / largest).item() for name, of in others.items()}


def check_forms(config):
    """ModelError if the three forms of an arm are not the same function."""
    for name, difference in compare_forms(config).items():
        if not difference < 1e-3:
            raise ModelError(
                f"attn={config.attn}: the form that trains and its {name} differ by "
                f"{difference:.1%}. A class that changes one of maps, fast, prefill and step has "
                "to change the others, too. Attention has slow ones that fit any maps: "
                "fast = Attention.fast, and so for prefill and step"
            )
