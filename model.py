"""
Softmax, linear and differential attention side by side in one GPT.

                        one map     one map minus       the difference
                                    the average         of two maps
    exp(q . k)          softmax     softmax_average     diff, diff_v2
    phi(q) . phi(k)     linear      linear_average      diff_linear

    diff        Differential Transformer, arXiv 2410.05258, which we call the paper
    diff_v2     its authors' second version, https://huggingface.co/blog/microsoft/diff-attn-v2
    linear      Transformers are RNNs, arXiv 2006.16236

Attention multiplies the values V by a causal T x T matrix A, which we call the map: row i says how
much token i takes from each token j <= i. The difference of two maps is meant to cancel the weight
that both of them give to irrelevant tokens. We call a kind of attention an arm, as in a trial. An
arm is a class that has its equation in two forms:

    make_map    A, as its paper writes it: to read, to look at, and to test the other form
    attend      A V, computed without ever holding A: this is what trains

    softmax               A_ij = exp((R_i q_i) . (R_j k_j) / sqrt(d)) / z_i
    linear                A_ij = (R_i phi(q_i)) . (R_j phi(k_j)) / z_i
    minus the average     A - lambda U, where U_ij = 1 / i for all j <= i, and lambda is learned
    difference            A_1 - lambda A_2, where each map has queries of its own

R_i is the rotary embedding, a rotation by angles that grow with the position i. phi is a feature
map, whose values are positive. z_i makes the weights of a row sum to 1. (In a linear map z_i is
computed without the rotation. So its rows need not sum to 1, and a weight may be negative.)

The letters for shapes:

    here  paper     Microsoft's code
    B                           batch
    T                           tokens
    C     d_model   embed_dim   channels of a token: n_embd
    H                           maps, each with queries of its own: n_head (diff_v2: 2 n_head)
    h     h         num_heads   heads, each with values of its own: H, but H/2 for a difference
    d     d         head_dim    channels of a query and of a key: C / n_head
    d_v   2d                    channels of a value: C / h, which is 2d in diff and diff_linear

Five things that reimplementations of diff often get wrong. Here, as in Microsoft's code,

    1. the two maps of head n are neighbours, 2n and 2n + 1, and share a value twice as wide
    2. the rotation turns neighbouring channels, 2m and 2m + 1
    3. lambda_init counts the layers from 0
    4. the norm is over the channels of one token and one head, and over nothing else
    5. scores are divided by sqrt(d), where d is the width of a query, not that of a value

The file begins with the equations. What they are made of (rotate, phi, ...) stands below them.
"""
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

NORM_EPS = 1e-5  # of every RMSNorm

# ---- the maps

def softmax_map(q, k, rope):
    """A_ij = exp(R_i q_i . R_j k_j / sqrt(d)) / z_i for j <= i, else 0. (B, H, T, T)"""
    q = rotate(q, rope)  # (B, H, T, d)
    k = for_each_map(rotate(k, rope), q)  # (B, H, T, d)
    with torch.autocast(q.device.type, enabled=False):  # bf16 would round large scores too much
        scores = upcast(q) @ upcast(k).mT / math.sqrt(q.shape[-1])  # (B, H, T, T)
    is_future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    return scores.masked_fill(is_future, -math.inf).softmax(-1)


def linear_map(q, k, rope):
    """A_ij = R_i phi(q_i) . R_j phi(k_j) / z_i for j <= i, else 0. (B, H, T, T)

    z_i is the sum of phi(q_i) . phi(k_j) over j <= i. It is not rotated, so that it is a sum of
    positive numbers (RoFormer, arXiv 2104.09864, Section 3.3).
    """
    q, k = phi(q), phi(k)
    z = upcast(q @ k.mT).tril().sum(-1, keepdim=True) + 1e-12  # (B, H, T, 1), never 0
    return upcast(rotate(q, rope) @ rotate(k, rope).mT).tril() / z


def average_map(A):
    """U, (T, T), for maps A (B, H, T, T): the i-th token takes 1 / i from each one up to itself."""
    ones = torch.ones_like(A[0, 0]).tril()
    return ones / ones.sum(-1, keepdim=True)


# ---- the arms

class Attention(nn.Module):
    """What all arms share. layer(x) takes (B, T, C) to (B, T, C), and layer.map(x) is A.

    An arm of your own is a subclass with one or more of

        make_map(self, q, k, x, rope)           A (B, h, T, T), causal. q and k are not rotated yet
        attend(self, q, k, v, x, rope, state)   A V (B, h, T, d_v), as a fast form of the same
        project(self, x)                        other q, k, v, each of its own token only
        lam(self, x)                            another lambda: a number, or up to (B, h, T, 1), in
                                                an arm that has one

    make_map alone trains through the map, correctly but slowly. If the same class also has an
    attend, that one trains, and train.py compares the two before a run. project and lam serve both.

    attend alone is allowed, too: then it is compared with nothing. A GPT draws all weights named
    ..._proj anew, also one that you set to 0: give a gate that starts at 0 another name. The
    parameters of diff have the names and shapes of Microsoft's MultiheadDiffAttn.
    """

    value_width = 1  # d_v / d. 2: values are twice as wide, so there are n_head / 2 heads
    usual_subln = 0.0  # the norm's first weight, if config.subln is None. 0: there is no norm

    def __init__(self, config, depth):
        super().__init__()
        C, n_head = config.n_embd, config.n_head
        if n_head < 1 or n_head % self.value_width != 0:
            raise ModelError(f"n_head must be a multiple of {self.value_width}, not {n_head}")
        if C < 1 or C % (2 * n_head) != 0:  # the rotation turns pairs of channels
            raise ModelError(f"n_embd must be a multiple of {2 * n_head}, not {C}")
        self.config = config
        self.d = C // n_head
        self.h = n_head // self.value_width
        self.q_proj = nn.Linear(C, C, bias=False)
        self.k_proj = nn.Linear(C, C, bias=False)
        self.v_proj = nn.Linear(C, C, bias=False)
        self.out_proj = nn.Linear(C, C, bias=False)
        self.lambda_init = 0.0  # the factor 1 - lambda_init is 1. Diff sets its own
        self.subln = None  # no norm
        first_weight = self.usual_subln if config.subln is None else config.subln
        if first_weight > 0:
            # over the channels of one token and one head, and over nothing else
            self.subln = nn.RMSNorm(C // self.h, eps=NORM_EPS)  # all heads share its weight
            nn.init.constant_(self.subln.weight, first_weight)
        self.forms = forms_of(type(self))

    def forward(self, x, rope=None, state=None):
        """rope: the angles of these positions, see make_rope. None: positions from 0 on.

        state: a dict, {} at first, in which attend stores what later tokens need, a cache. The next
        call may have one token or many. If attend leaves it empty, generate gives the whole text
        each time.
        """
        if rope is None:
            if state:
                raise ValueError("a text that goes on needs the rope of its positions")
            rope = make_rope(self.config, x.shape[1], x.device, x.dtype)
        q, k, v = self.project(x)
        if self.config.kernel == "map" or "attend" not in self.forms:
            A = self.own_map(q, k, x, rope).to(v.dtype)  # slow, and it keeps no state
            y = A @ for_each_map(v, A)
        else:
            y = self.attend(q, k, v, x, rope, {} if state is None else state)  # (B, h, T, d_v)
        if self.subln is not None:  # the factor of Eq. 3 belongs to the norm
            y = self.subln(y.to(self.subln.weight.dtype)) * (1 - self.lambda_init)
        y = y.transpose(1, 2).flatten(2)  # the heads side by side, (B, T, C)
        return self.out_proj(y.to(self.out_proj.weight.dtype))

    def project(self, x):
        """q (B, H, T, d), v (B, h, T, d_v), and k (B, H, T, d), or (B, h, T, d) in diff_v2."""
        q = self.q_proj(x).unflatten(-1, (-1, self.d)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (-1, self.d)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
        return q, k, v

    def map(self, x):
        """A of x, (B, h, T, T), to look at."""
        q, k, _ = self.project(x)
        return self.own_map(q, k, x, make_rope(self.config, x.shape[1], x.device, x.dtype))

    def own_map(self, q, k, x, rope):
        """make_map, or an error if it is inherited, and does not belong to this class's attend."""
        if "make_map" not in self.forms:
            raise NotImplementedError(f"{type(self).__name__} has no make_map of its own")
        return self.make_map(q, k, x, rope)


class Softmax(Attention):
    """A = softmax(Q K^T / sqrt(d))"""

    def make_map(self, q, k, x, rope):
        return softmax_map(q, k, rope)

    def attend(self, q, k, v, x, rope, state):
        return softmax_attention(q, k, v, rope, state, self.config.kernel)


class SoftmaxAverage(Softmax):
    """A - lambda U, where U V is the mean of the values so far.

    A control for the minus alone: compare it with softmax. Against diff it lacks more than a
    learned second map: the norm, the factor and the wide values.
    """

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.lambda_average = nn.Parameter(torch.tensor(0.2))

    def lam(self, x):
        return self.lambda_average

    def make_map(self, q, k, x, rope):
        A = softmax_map(q, k, rope)
        return A - self.lam(x) * average_map(A)

    def attend(self, q, k, v, x, rope, state):
        y = softmax_attention(q, k, v, rope, state, self.config.kernel)
        return y - self.lam(x) * running_mean(v, state)


class Diff(Softmax):
    """Differential attention, in the paper's equations:

        A = softmax(Q_1 K_1^T / sqrt(d)) - lambda softmax(Q_2 K_2^T / sqrt(d))            (Eq. 1)
        lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init    (Eq. 2)
        head = (1 - lambda_init) RMSNorm(A V)                                             (Eq. 3)

    The queries and keys 2n and 2n + 1 make the two maps of head n, whose values are twice as wide.
    A row of A sums to 1 - lambda only. The norm and the factor make the output of each head
    1 - lambda_init in size, at first: 0.8 in the first layer, which is more than softmax's.
    """

    value_width = 2
    usual_subln = 1.0

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)  # depth: the first layer is 0
        # a GPT draws these anew, in draw_parameters. Here they serve a layer that is used alone
        self.lambda_q1 = nn.Parameter(torch.randn(self.d) * 0.1)
        self.lambda_k1 = nn.Parameter(torch.randn(self.d) * 0.1)
        self.lambda_q2 = nn.Parameter(torch.randn(self.d) * 0.1)
        self.lambda_k2 = nn.Parameter(torch.randn(self.d) * 0.1)

    def lam(self, x):
        """Eq. 2, one number for the layer. (It does not need x. The lambda of diff_v2 does.)"""
        # (a * b).sum() and not a @ b, which autocast would compute in bf16
        lambda_1 = torch.exp((upcast(self.lambda_q1) * self.lambda_k1).sum())
        lambda_2 = torch.exp((upcast(self.lambda_q2) * self.lambda_k2).sum())
        return lambda_1 - lambda_2 + self.lambda_init

    def make_map(self, q, k, x, rope):
        A = softmax_map(q, k, rope)  # (B, H, T, T)
        return A[:, 0::2] - self.lam(x) * A[:, 1::2]

    def attend(self, q, k, v, x, rope, state):
        y = softmax_attention(q, k, v, rope, state, self.config.kernel)
        y = upcast(y)  # (B, H, T, d_v). The difference of two nearly equal numbers is not for bf16
        return y[:, 0::2] - self.lam(x) * y[:, 1::2]


class DiffV2(Softmax):
    """The second version: keys and values as in softmax, and queries 2n and 2n + 1 for head n.

    lambda = sigmoid(x W) is a number for each head and token. There is no norm, and no lambda_init.
    """

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.q_proj = nn.Linear(config.n_embd, 2 * config.n_embd, bias=False)
        self.lambda_proj = nn.Linear(config.n_embd, self.h, bias=False)

    def lam(self, x):
        lam = upcast(self.lambda_proj(x)).sigmoid()  # (B, T, h), at first about 1/2
        return lam.mT[..., None]  # (B, h, T, 1)

    make_map, attend = Diff.make_map, Diff.attend  # Eq. 1, with this lambda


class Linear(Attention):
    """A_ij = R_i phi(q_i) . R_j phi(k_j) / z_i, see linear_map"""

    def make_map(self, q, k, x, rope):
        return linear_map(q, k, rope)

    def attend(self, q, k, v, x, rope, state):
        q, k = features(q, k, rope, state)
        return linear_attention(q, k, v, state)


class LinearAverage(SoftmaxAverage):  # inherits only its lambda. Both forms are replaced
    """A - lambda U, where A is a linear map."""

    def make_map(self, q, k, x, rope):
        A = linear_map(q, k, rope)
        return A - self.lam(x) * average_map(A)

    def attend(self, q, k, v, x, rope, state):
        q, k = features(q, k, rope, state)
        return linear_attention(q, k, v, state) - self.lam(x) * running_mean(v, state)


class DiffLinear(Diff):  # inherits only its lambda and its norm. Both forms are replaced
    """Eq. 1 with two linear maps, which fold into one linear attention:

        q_1 . k_1 - lambda q_2 . k_2 = [q_1, -lambda q_2] . [k_1, k_2]

    (Here q and k are features, rotated, and each q is divided by its z.) So the difference of two
    linear maps is one linear map with twice the features. Softmax can't do that: the exp of the
    joined scores would be a quotient, exp(s_1) / exp(lambda s_2), and not a difference.
    """

    def make_map(self, q, k, x, rope):
        A = linear_map(q, k, rope)  # (B, H, T, T)
        return A[:, 0::2] - self.lam(x) * A[:, 1::2]

    def attend(self, q, k, v, x, rope, state):
        q, k = features(q, k, rope, state)  # (B, H, T, d)
        q = torch.cat((q[:, 0::2], -self.lam(x) * q[:, 1::2]), dim=-1)  # (B, h, T, 2d)
        k = torch.cat((k[:, 0::2], k[:, 1::2]), dim=-1)  # (B, h, T, 2d)
        return linear_attention(q, k, v, state)


ATTENTION = {  # an arm of your own: ATTENTION["mine"] = Mine, in your own file
    "softmax": Softmax,
    "softmax_average": SoftmaxAverage,
    "diff": Diff,
    "diff_v2": DiffV2,
    "linear": Linear,
    "linear_average": LinearAverage,
    "diff_linear": DiffLinear,
}

# ---- A V without the map

def softmax_attention(q, k, v, rope, state, kernel):
    """softmax_map(q, k, rope) @ v, (B, H, T, d_v), without holding the map.

    q, k and v are as `project` makes them. The state keeps the rotated keys and the values of all
    tokens so far, a KV cache, which grows with the text. So there may be more keys than queries.
    """
    q, k = rotate(q, rope), rotate(k, rope)
    if "k" in state:
        k = torch.cat((state["k"], k), dim=2)
        v = torch.cat((state["v"], v), dim=2)
    state.update(k=k, v=v)
    return fused_attention(q, for_each_map(k, q), for_each_map(v, q), kernel)


def linear_attention(q, k, v, state, chunk=64):
    """y_i = the sum over j <= i of (q_i . k_j) v_j, in O(T) and without the map. (B, h, T, d_v)

    Without an exp around q . k, the sum over j can be taken before the query comes: y_i = q_i S_i,
    where S_i = the sum over j <= i of k_j v_j^T is a matrix, whose size does not grow. But an S for
    each token would fill the memory, and a loop over the tokens would be slow on a GPU. So the text
    is cut into chunks. A query reads its own chunk through a small map, and all earlier chunks
    through the S at their end.

    q, k (B, h, T, f) with f features, v (B, h, T, d_v). The state keeps the last S.
    """
    T = v.shape[2]
    if T == 1:  # the next token of a sample: a step of a recurrent net (2006.16236, Eq. 18 to 20)
        state["S"] = state.get("S", 0) + (upcast(k).mT * upcast(v))[:, :, None]  # as one chunk
        # q S as a product and a sum, because autocast would round a matmul to bf16
        return (upcast(q).mT * state["S"][:, :, 0]).sum(2, keepdim=True)
    # contiguous(): else torch.compile fails if T is unknown to it and no padding is needed
    q, k, v = [
        F.pad(x.to(v.dtype).contiguous(), (0, 0, 0, -T % chunk)).unflatten(2, (-1, chunk))
        for x in (q, k, v)
    ]  # (B, h, N, chunk, f) with N chunks
    S = upcast(k.mT @ v).cumsum(2)  # the sums up to the end of each chunk, (B, h, N, f, d_v)
    S = F.pad(S, (0, 0, 0, 0, 1, 0)) + state.get("S", 0)  # N + 1: before each chunk, and at the end
    state["S"] = S[:, :, -1:]  # (B, h, 1, f, d_v)
    y = (q @ k.mT).tril() @ v + q @ S[:, :, :-1].to(v.dtype)
    return y.flatten(2, 3)[:, :, :T]


def features(q, k, rope, state):
    """R phi(q) / z and R phi(k), (B, H, T, d): the products of these two are the linear map.

    z_i is the same for a whole row of the map, so we can divide the query by it. It is
    phi(q_i) . Z_i, where Z_i is the sum of phi(k_j) over j <= i. The state keeps the last Z.
    """
    q, k = phi(q), phi(k)
    Z = upcast(k).cumsum(2) + state.get("Z", 0)  # (B, H, T, d)
    state["Z"] = Z[:, :, -1:]
    z = (upcast(q) * Z).sum(-1, keepdim=True) + 1e-12  # (B, H, T, 1), never 0
    return rotate(q, rope) / z, rotate(k, rope)


def running_mean(v, state):
    """U v, the mean of the values so far, (B, h, T, d_v). The state keeps their sum and number."""
    total = upcast(v).cumsum(2) + state.get("total", 0)
    count = torch.arange(1, v.shape[2] + 1, device=v.device)[:, None] + state.get("count", 0)
    state.update(total=total[:, :, -1:], count=count[-1])
    return total / count


def fused_attention(q, k, v, kernel):
    """softmax(q k^T / sqrt(d)) v in a kernel that holds no map, (B, H, T, d_v).

    q (B, H, T, d), k (B, H, T_k, d), v (B, H, T_k, d_v). The queries belong to the last T of T_k
    tokens.
    """
    scale = q.shape[-1] ** -0.5
    T, T_k = q.shape[2], k.shape[2]
    is_hopper = q.is_cuda and torch.cuda.get_device_properties(q.device).major == 9  # H100, H200
    if kernel == "flash_attn" or not is_hopper:
        # flash-attn 2 and PyTorch's flash kernel want queries as wide as values. (cuDNN, which we
        # use on a Hopper, and flash-attn 3 and 4 do not.) Zeros change no product q . k
        q = F.pad(q, (0, v.shape[-1] - q.shape[-1]))
        k = F.pad(k, (0, v.shape[-1] - k.shape[-1]))
    if kernel == "flash_attn":
        try:
            from flash_attn import flash_attn_func
        except ImportError as e:
            raise ImportError("kernel flash_attn needs the package flash-attn") from e
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, T, H, d_v)
        return flash_attn_func(q, k, v, softmax_scale=scale, causal=True).transpose(1, 2)
    if T < T_k:  # the next tokens of a sample, mostly one: their map is small, any kernel will do
        mask = torch.ones(T, T_k, dtype=torch.bool, device=q.device).tril(T_k - T)
        mask = mask if T > 1 else None  # the last token sees all
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    if q.device.type == "mps":  # Apple's GPUs have a kernel of their own
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    # without this list PyTorch may silently take its MATH backend, which holds the whole map
    first = SDPBackend.CUDNN_ATTENTION if is_hopper else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel([first, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return OneLayout.apply(y) if is_hopper else y


class OneLayout(torch.autograd.Function):
    """y itself, but its gradient always lies in memory in the order (B, T, H, d_v).

    cuDNN plans a backward pass for one such order, and PyTorch 2.11 uses the plan for other orders,
    too. Then the gradients of q, k and v are completely wrong, without any warning (measured on an
    H200; pytorch #191576).
    """

    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.transpose(1, 2).contiguous().transpose(1, 2)


# ---- what both forms are made of

def for_each_map(k, q):
    """Keys or values, (B, h, T, ...), of which each is repeated for the maps that share it."""
    times = q.shape[1] // k.shape[1]
    return k if times == 1 else k.repeat_interleave(times, dim=1)


def upcast(x):
    """bf16 to float32, for sums and differences that bf16 would round away. float64 stays."""
    return x if x.dtype.itemsize >= 4 else x.float()


def phi(x):
    """elu(x) + 1 (2006.16236, Eq. 7), written so that bf16 does not round it to 0 below x = -6."""
    return F.relu(x) + torch.exp(x.clamp(max=0))


def make_rope(config, T, device, dtype, start=0):
    """Cosines and sines of the angles i theta^(-2m/d), for T positions i from start on and all
    pairs m of channels: (T, d/2) each.
    """
    d = config.n_embd // config.n_head
    # in float64, because the angles of late positions are large, and float32 would round them.
    # Apple's MPS has no float64
    place = "cpu" if torch.device(device).type == "mps" else device
    m = torch.arange(d // 2, device=place, dtype=torch.float64)
    frequency = config.rope_theta ** (-2 * m / d) if config.rope_theta else torch.zeros_like(m)
    angle = torch.arange(start, start + T, device=place)[:, None] * frequency
    # one table in memory. Else torch.compile computes the cosines anew wherever they are used
    table = torch.stack((angle.cos(), angle.sin()))
    return table.to(torch.promote_types(dtype, torch.float32)).to(device).unbind()


def rotate(x, rope):
    """Turn each pair of neighbouring channels of x (B, H, T, d) by its angle (RoFormer, Eq. 34)."""
    cos, sin = rope
    x_even, x_odd = x.unflatten(-1, (-1, 2)).unbind(-1)  # (B, H, T, d/2) each
    even = x_even * cos - x_odd * sin
    odd = x_even * sin + x_odd * cos
    return torch.stack((even, odd), dim=-1).flatten(-2).to(x.dtype)


def forms_of(arm):
    """{"make_map"}, {"attend"} or both: those that the most derived class with any of them has.

    A class that overrides make_map alone must not train through the attend of its parent.
    """
    for kind in arm.__mro__:
        found = {"make_map", "attend"} & vars(kind).keys()
        if found:
            return found
    return set()


class ModelError(ValueError):
    """No model can be made of these settings, or of this file."""


# ---- the GPT

@dataclass
class GPTConfig:
    """The settings of a model, by default GPT-2 small's. None: the arm's own default."""

    attn: str = "softmax"  # kind of attention ("arm"), a name in ATTENTION
    n_layer: int = 12  # blocks
    n_head: int = 12  # maps (of diff_v2: pairs of maps). A head of diff and diff_linear has two
    n_embd: int = 768  # channels
    block_size: int = 1024  # tokens of a training sequence
    vocab_size: int = 50257  # of the tokenizer
    mlp_width: int | None = None  # channels in the MLP (so that all arms have equally many weights)
    rope_theta: float = 10000.0  # base of the rotary embedding's angles, 0 for no rotation
    subln: float | None = None  # first weight of the norm of heads (1 in diff). 0: nor a factor
    kernel: Literal["sdpa", "flash_attn", "map"] = "sdpa"  # map: the equation itself, slow


class MLP(nn.Module):
    """SwiGLU(x) = (silu(x W_gate) * x W_up) W_down   (Section 2.2 of the paper)"""

    def __init__(self, C, width):
        super().__init__()
        self.gate_proj = nn.Linear(C, width, bias=False)
        self.up_proj = nn.Linear(C, width, bias=False)
        self.down_proj = nn.Linear(width, C, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and then the MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config, depth):
        super().__init__()
        C = config.n_embd
        if config.attn not in ATTENTION:
            arms = ", ".join(ATTENTION)
            raise ModelError(f"attn is {config.attn!r} (yours? run its file), not one of {arms}")
        self.attn = ATTENTION[config.attn](config, depth)
        width = config.mlp_width
        if width is None:
            # 8C/3 is usual for SwiGLU, here rounded down to a multiple of 8. If the arm's matrices
            # have more parameters than softmax's, the MLP is narrower: a channel of it has 3C
            more = sum(p.numel() for p in self.attn.parameters() if p.ndim > 1) - 4 * C * C
            width = max(8, 8 * C // 3 // 8 * 8 - round(more / (3 * C)))
        self.norm1 = nn.RMSNorm(C, eps=NORM_EPS)
        self.norm2 = nn.RMSNorm(C, eps=NORM_EPS)
        self.mlp = MLP(C, width)

    def forward(self, x, rope, state):
        x = x + self.attn(self.norm1(x), rope, state)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The whole model. A text may be longer than block_size.

    seed: None draws no parameters, for load. Raises ModelError for impossible settings.
    """

    def __init__(self, config, seed=1337):
        super().__init__()
        self.config = config
        self.extra = {}  # what was saved with the model, see load
        rows = math.ceil(config.vocab_size / 64) * 64  # a multiple of 64 makes matmuls faster
        self.wte = nn.Embedding(rows, config.n_embd)  # the embedding is also the output layer
        self.blocks = nn.ModuleList(Block(config, depth) for depth in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        if seed is not None:
            self.draw_parameters(seed)

    @torch.no_grad()
    def draw_parameters(self, seed):
        """Draw the embedding, the lambda vectors, and all that is named ..._proj.

        Each has a generator seeded by its name, so what two arms share starts with the same bits.
        The std is nn.Linear's. GPT-2's 0.02 is too small for small models: every map starts flat.
        """
        from hashlib import sha256

        for name, p in self.named_parameters():
            kind = name.removesuffix(".weight").split(".")[-1]  # like "q_proj", "lambda_q1"
            if kind in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                std = 0.1
            elif kind == "wte" or kind.endswith("_proj"):
                std = 1 / math.sqrt(3 * p.shape[-1])
            else:  # the weight of a norm, lambda_average, or a parameter of a class of yours
                continue
            if kind in ("out_proj", "down_proj"):  # they add up in the residual stream (GPT-2)
                std /= math.sqrt(2 * self.config.n_layer)
            digest = sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
            p.copy_(torch.randn(p.shape, generator=generator) * std)

    def forward(self, idx, targets=None, state=None):
        """idx, targets (B, T) int64. Returns (logits, loss).

        With targets: the logits (B, T, vocab_size), detached, and the mean loss in nats. Without:
        the logits of the last token alone, (B, 1, vocab_size), and None.
        state: a dict, {} at first, to pass with each next part of a text that comes in parts.
        """
        start = 0
        layer_states = [None] * len(self.blocks)
        if state is not None:
            start = state.get("length", 0)
            layer_states = state.setdefault("layers", [{} for _ in self.blocks])
            if start > 0 and not all(layer_states):
                raise ValueError(f"{self.config.attn} keeps no state: it needs the whole text")
            state["length"] = start + idx.shape[1]
        x = self.wte(idx)  # (B, T, C)
        rope = make_rope(self.config, x.shape[1], x.device, x.dtype, start)
        for block, layer_state in zip(self.blocks, layer_states):
            x = block(x, rope, layer_state)
        x = self.norm(x[:, -1:] if targets is None else x)
        logits = F.linear(x, self.wte.weight)[..., : self.config.vocab_size]
        if targets is None:
            return logits, None
        loss = F.cross_entropy(upcast(logits).flatten(0, 1), targets.flatten())
        return logits.detach(), loss  # else the logits would keep the whole graph in memory

    @torch.inference_mode()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Yields the next token of every row of idx (B, T), (B,) int64, max_new_tokens times.

        temperature: 0 takes the likeliest token. top_k: choose among the k likeliest only.
        """
        longest = self.config.block_size  # no arm was trained on longer sequences
        idx = idx[:, -longest:]
        state, new = {}, idx  # new: the tokens that the state has not seen
        for _ in range(max_new_tokens):
            logits, _ = self(new, state=state)
            new = next_token(logits[:, -1], temperature, top_k, generator)  # (B, 1)
            yield new[:, 0]
            idx = torch.cat((idx, new), dim=1)
            is_full = idx.shape[1] > longest
            if is_full:
                idx = idx[:, -max(1, longest // 2) :]  # go on from the newer half
            if is_full or not all(state["layers"]):  # an arm without a state rereads the text
                state, new = {}, idx

    def save(self, path, **extra):
        """Write the model and extra, tensors and plain values. A kill leaves the old file whole."""
        config = {f.name: getattr(self.config, f.name) for f in fields(GPTConfig)}
        temporary = Path(f"{path}.tmp")
        try:
            torch.save(dict(config=config, model=self.state_dict(), **extra), temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)  # half of it may lie on a full disk

    @classmethod
    def load(cls, path, device="cpu"):
        """The model that save() wrote, in eval mode, with what else was saved in its .extra.

        Attention is computed as in training, but with SDPA in place of flash_attn. No code in the
        file is run. Raises OSError or ModelError if it can't be loaded.
        """
        try:
            extra = torch.load(path, map_location="cpu", weights_only=True)
            config = GPTConfig(**extra.pop("config"))
            config.kernel = "map" if config.kernel == "map" else "sdpa"
            model = cls(config, seed=None)
            model.load_state_dict(extra.pop("model"))
        except (FileNotFoundError, IsADirectoryError, PermissionError, MemoryError, ModelError):
            raise
        except Exception as e:  # a file can be wrong in many ways
            why = " ".join(str(e).split()) if "state_dict" in str(e) else type(e).__name__
            why = f"it is damaged, or of another model ({why:.200})"
            raise ModelError(f"{path} can't be loaded: {why}") from e
        model.extra = extra
        return model.to(device).eval()


def next_token(logits, temperature=1.0, top_k=None, generator=None):
    """Choose the next token by the logits (B, vocab_size): (B, 1) int64."""
    if temperature < 1e-6:  # a division by less would overflow
        return logits.argmax(-1, keepdim=True)
    logits = upcast(logits) / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < least, -math.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
