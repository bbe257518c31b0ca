"""
Softmax, linear and differential attention side by side in one GPT.

                        one map     one map minus       the difference
                                    the average         of two maps
    exp(q . k)          softmax     softmax_average     diff, diff_v2
    phi(q) . phi(k)     linear      linear_average      diff_linear

    diff        Differential Transformer, arXiv 2410.05258 ("the paper": Eq. 1 to 3 are its own)
    diff_v2     its authors' second version, https://huggingface.co/blog/microsoft/diff-attn-v2
    linear      Transformers are RNNs, arXiv 2006.16236

Attention multiplies the values V by a causal T x T matrix A, which we call the map: row i says how
much token i takes from each token j <= i, itself among them.

    softmax     A_ij = exp(R_i q_i . R_j k_j / sqrt(d)) / z_i     z_i: the sum of the row
    linear      A_ij = R_i phi(q_i) . R_j phi(k_j) / z_i          z_i: that sum without the R

R_i is the rotary embedding, a rotation by the position i, and phi a feature map, whose values are
positive. A differential arm (we call a kind of attention an arm) has the difference of two maps,
A = A_1 - lambda A_2, with a learned lambda: what both have in common goes, as far as lambda says.

`attention` below computes four of the arms in the simplest way. All that follows makes them fast,
and puts a GPT around them. The letters for shapes are

    B batch, T tokens (S keys, where a sample goes on), C channels (n_embd)
    H maps, each with queries of its own, d channels each
    h heads of values, d_v channels each: h = H, or H/2 where two maps share a value
"""
import hashlib
import inspect
import math
import os
from dataclasses import dataclass, fields
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

NORM_EPS = 1e-5  # of every RMSNorm

# ---- the maps

def softmax_map(q, k):
    """softmax(q k^T / sqrt(d)), without the future. (B, H, T, S)

    q (B, H, T, d) and k (B, H, S, d) are rotated. The queries are those of the last T of S tokens.
    """
    with torch.autocast(q.device.type, enabled=False):  # it would round large scores to bf16
        scores = upcast(q) @ upcast(k).mT / math.sqrt(q.shape[-1])
    T, S = scores.shape[-2:]
    if T == 1:  # a step of a sample: nothing is future to the last token
        return scores.softmax(-1)
    is_future = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(1 + S - T)
    return scores.masked_fill(is_future, -math.inf).softmax(-1)


def linear_map(q, k, rope):
    """(R_i q_i) . (R_j k_j) / z_i, without the future. (B, H, T, T)

    q and k (B, H, T, d) are features, phi. Only the numerator is rotated, so z is a sum of positive
    numbers (RoFormer, arXiv 2104.09864, Section 3.3). But the row itself need not sum to 1.
    """
    z = upcast(q @ k.mT).tril().sum(-1, keepdim=True) + 1e-12  # (B, H, T, 1), never 0
    return upcast(rotate(q, rope) @ rotate(k, rope).mT).tril() / z


def attention(layer, x, kind):
    """A whole layer as straight code, x (B, T, C) to (B, T, C).

    kind: softmax, linear, diff or diff_linear. layer: a class below, which computes the same.
    """
    H = h = layer.config.n_head
    if kind in ("diff", "diff_linear"):
        h = H // 2  # the heads 2n and 2n+1 are the two maps of one head, with values twice as wide
    q = layer.q_proj(x).unflatten(-1, (H, -1)).transpose(1, 2)  # (B, H, T, d)
    k = layer.k_proj(x).unflatten(-1, (H, -1)).transpose(1, 2)  # (B, H, T, d)
    v = layer.v_proj(x).unflatten(-1, (h, -1)).transpose(1, 2)  # (B, h, T, d_v)
    rope = make_rope(layer.config, x.shape[1], x.device, x.dtype)
    if kind in ("softmax", "diff"):
        A = softmax_map(rotate(q, rope), rotate(k, rope))  # (B, H, T, T)
    else:
        A = linear_map(phi(q), phi(k), rope)
    if kind in ("softmax", "linear"):
        y = A @ v
    else:
        lambda_1 = torch.exp(layer.lambda_q1 @ layer.lambda_k1)
        lambda_2 = torch.exp(layer.lambda_q2 @ layer.lambda_k2)
        lam = lambda_1 - lambda_2 + layer.lambda_init  # Eq. 2
        A = A[:, 0::2] - lam * A[:, 1::2]  # Eq. 1, (B, h, T, T)
        y = layer.subln(A @ v) * (1 - layer.lambda_init)  # Eq. 3. subln is an RMSNorm
    return layer.out_proj(y.transpose(1, 2).flatten(2))  # the heads side by side


def upcast(x):
    """bf16 to float32, for sums and differences that it would round away. float64 stays float64."""
    return x if x.dtype.itemsize >= 4 else x.float()


def phi(x):
    """elu(x) + 1 (2006.16236, Eq. 7), written so that bf16 does not make 0 of it below x = -6."""
    return F.relu(x) + torch.exp(x.clamp(max=0))


def make_rope(config, T, device, dtype, start=0):
    """Cosines and sines of the angles m theta^(-2i/d) of T positions m from start on, (T, d/2)."""
    d = config.n_embd // config.n_head
    # in float64, because the angles of late positions are large, and float32 would round them
    i = torch.arange(d // 2, device=device, dtype=torch.float64)
    frequency = config.rope_theta ** (-2 * i / d) if config.rope_theta else torch.zeros_like(i)
    angle = torch.arange(start, start + T, device=device)[:, None] * frequency
    # one table in memory. Else torch.compile computes the cosines anew wherever they are used
    table = torch.stack((angle.cos(), angle.sin()))
    return table.to(torch.promote_types(dtype, torch.float32)).unbind()


def rotate(x, rope):
    """Turn each pair of neighbouring channels of x (B, H, T, d) by its angle (RoFormer, Eq. 34)."""
    cos, sin = rope
    x_even, x_odd = x.unflatten(-1, (-1, 2)).unbind(-1)  # (B, H, T, d/2) each
    even = x_even * cos - x_odd * sin
    odd = x_even * sin + x_odd * cos
    return torch.stack((even, odd), dim=-1).flatten(-2).to(x.dtype)


# ---- A V without the map

def softmax_attention(q, k, v, kernel):
    """softmax_map(q, k) @ v, (B, H, T, d_v). To train, in a fused kernel, which holds no map.

    q (B, H, T, d), k (B, H, S, d), rotated, v (B, h, S, d_v). kernel: see GPTConfig.
    """
    if kernel == "map" or q.shape[2] < k.shape[2]:  # fewer queries: the next tokens of a sample
        A = softmax_map(q, k).to(v.dtype)  # whose maps 2n and 2n+1 may read the same values
        return (A.reshape(*v.shape[:2], -1, A.shape[-1]) @ v).reshape(*A.shape[:3], -1)
    v = for_each_map(v, q)
    scale = q.shape[-1] ** -0.5
    is_hopper = q.is_cuda and torch.cuda.get_device_properties(q.device).major == 9  # H100, H200
    if not is_hopper or kernel == "flash_attn":
        # all but cuDNN on a Hopper want keys as wide as the values. Zeros change no product q . k
        q = F.pad(q, (0, v.shape[-1] - q.shape[-1]))
        k = F.pad(k, (0, v.shape[-1] - k.shape[-1]))
    if kernel == "flash_attn":
        from flash_attn import flash_attn_func

        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, T, H, d_v)
        return flash_attn_func(q, k, v, softmax_scale=scale, causal=True).transpose(1, 2)
    # without such a list PyTorch may silently take its MATH backend, which holds the whole map
    first = SDPBackend.CUDNN_ATTENTION if is_hopper else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel([first, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def linear_attention(q, k, v, state, chunk=64):
    """y_i = the sum over j <= i of (q_i . k_j) v_j, without the map. (B, h, T, d_v)

    Without an exp around q . k, the sum over j can be taken before the query comes: y_i = q_i S_i,
    where S_i = the sum over j <= i of k_j v_j^T is a matrix, whose size does not grow. A query
    reads its own chunk of tokens through a small map, and all earlier ones through S: O(T) in all.

    q, k (B, h, T, f) with f features, v (B, h, T, d_v). The state keeps the last S.
    """
    T = v.shape[2]
    if T == 1:  # a single token: a step of a recurrent net (2006.16236, Eq. 18 to 20)
        state["S"] = state.get("S", 0) + (upcast(k).mT * upcast(v))[:, :, None]
        # q S as a product and a sum, because autocast would round a matmul to bf16
        return (upcast(q).mT * state["S"][:, :, 0]).sum(2, keepdim=True)
    # without contiguous torch.compile fails where T is unknown to it, as the padding may be 0
    q, k, v = [
        F.pad(x.to(v.dtype).contiguous(), (0, 0, 0, -T % chunk)).unflatten(2, (-1, chunk))
        for x in (q, k, v)
    ]  # (B, h, N, chunk, f) with N chunks
    S = upcast(k.mT @ v).cumsum(2)  # the sums up to the end of each chunk, (B, h, N, f, d_v)
    S = F.pad(S, (0, 0, 0, 0, 1, 0)) + state.get("S", 0)  # up to the start of each, and the end
    state["S"] = S[:, :, -1:]  # (B, h, 1, f, d_v)
    y = (q @ k.mT).tril() @ v + q @ S[:, :, :-1].to(v.dtype)
    return y.flatten(2, 3)[:, :, :T]


# ---- the layers

class Softmax(nn.Module):
    """A = softmax(Q K^T / sqrt(d)). The other classes say what they do differently.

    layer(x) takes (B, T, C) to (B, T, C), layer.map(x) is A, (B, h, T, T). The parameters have the
    names and shapes of Microsoft's MultiheadDiffAttn, whose num_heads is h.
    """

    heads_per_value = 1  # n_head / h: 2 in Diff and DiffLinear, where n_head counts the maps
    usual_subln = 0.0  # the first weight of the output norm. 0: no norm
    state_grows = True  # the state gets larger with each token

    @staticmethod
    def usual_mlp_width(C, H):  # 8C/3, as usual for SwiGLU, down to a multiple of 8
        return max(8, 8 * C // 3 // 8 * 8)

    def __init__(self, config, depth):
        super().__init__()
        C = config.n_embd
        self.config = config
        self.d = C // config.n_head
        self.h = config.n_head // self.heads_per_value
        self.q_proj = nn.Linear(C, C, bias=False)
        self.k_proj = nn.Linear(C, C, bias=False)
        self.v_proj = nn.Linear(C, C, bias=False)
        self.out_proj = nn.Linear(C, C, bias=False)
        self.lambda_init = 0.0  # then the factor of Eq. 3 is 1
        self.make_parameters(depth)
        self.subln = None
        if config.subln > 0:
            self.subln = nn.RMSNorm(C // self.h, eps=NORM_EPS)  # the heads share one weight
            nn.init.constant_(self.subln.weight, config.subln)

    def make_parameters(self, depth):
        """Makes the parameters that one map does not have."""

    def project(self, x):
        """Queries (B, H, T, d), keys (as many, or one for each value), values (B, h, T, d_v)."""
        q = self.q_proj(x).unflatten(-1, (-1, self.d)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (-1, self.d)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
        return q, k, v

    def forward(self, x, rope=None, state=None):
        """state: {} at first. It keeps what later tokens need, here k and v. Give rope with it."""
        if rope is None:
            rope = make_rope(self.config, x.shape[1], x.device, x.dtype)
        state = {} if state is None else state
        q, k, v = self.project(x)
        y = self.attend(q, k, v, x, rope, state)  # (B, H, T, d_v), in DiffLinear (B, h, T, d_v)
        y = self.subtract(y, v, x, state)  # (B, h, T, d_v)
        return self.output(y, x)

    def attend(self, q, k, v, x, rope, state):
        """What each map makes of the values, (B, H, T, d_v), without holding the map."""
        q, k = rotate(q, rope), rotate(for_each_map(k, q), rope)
        if "k" in state:
            k = torch.cat((state["k"], k), dim=2)
            v = torch.cat((state["v"], v), dim=2)
        state.update(k=k, v=v)
        return softmax_attention(q, k, v, self.config.kernel)

    def subtract(self, y, v, x, state):
        """What is left of the outputs y: with one map all. (v and state are for the average.)"""
        return y

    def output(self, y, x):
        """The outputs of the heads, y (B, h, T, d_v), side by side and projected: (B, T, C)."""
        if self.subln is not None:
            y = self.subln(y.to(self.subln.weight.dtype)) * (1 - self.lambda_init)  # Eq. 3
        y = y.transpose(1, 2).flatten(2)
        return self.out_proj(y.to(self.out_proj.weight.dtype))

    def map(self, x):
        """A of x, (B, h, T, T): to look at, and to test the fast form. Best in float32."""
        rope = make_rope(self.config, x.shape[1], x.device, x.dtype)
        q, k, _ = self.project(x)
        A = self.weights(q, k, rope)  # (B, H, T, T)
        V = torch.eye(x.shape[1], device=x.device, dtype=A.dtype)[None, None]  # A V = A
        return self.subtract(A, V, x, state={})

    def weights(self, q, k, rope):
        """The maps, (B, H, T, T), of queries and keys that are not rotated yet."""
        return softmax_map(rotate(q, rope), rotate(for_each_map(k, q), rope))


def for_each_map(k, q):
    """Keys or values (B, h, T, d), each repeated for the queries (B, H, T, d) that share it."""
    times = q.shape[1] // k.shape[1]
    return k if times == 1 else k.repeat_interleave(times, dim=1)


class SoftmaxAverage(Softmax):
    """A - lambda U, where U V is the running mean of V. A control: is any minus enough?"""

    def make_parameters(self, depth):
        self.lambda_average = nn.Parameter(torch.tensor(0.2))

    def lam(self, x):
        return self.lambda_average

    def subtract(self, y, v, x, state):
        total = upcast(v).cumsum(2) + state.get("total", 0)  # (B, h, T, d_v)
        count = torch.arange(1, v.shape[2] + 1, device=v.device)[:, None] + state.get("count", 0)
        state.update(total=total[:, :, -1:], count=count[-1])
        return upcast(y) - self.lam(x) * total / count


class Diff(Softmax):
    """A = softmax(Q_1 K_1^T / sqrt(d)) - lambda softmax(Q_2 K_2^T / sqrt(d))   (Eq. 1)

    The queries and keys 2n and 2n+1 make the two maps of head n, whose values are twice as wide.
    """

    heads_per_value = 2
    usual_subln = 1.0

    def make_parameters(self, depth):
        """The four vectors of Eq. 2. depth counts layers from 0, where the paper counts from 1."""
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        # in a GPT draw_parameters overwrites these. They are for a layer that is used alone
        self.lambda_q1 = nn.Parameter(torch.randn(self.d) * 0.1)
        self.lambda_k1 = nn.Parameter(torch.randn(self.d) * 0.1)
        self.lambda_q2 = nn.Parameter(torch.randn(self.d) * 0.1)
        self.lambda_k2 = nn.Parameter(torch.randn(self.d) * 0.1)

    def lam(self, x):
        """Eq. 2: one number for all heads and tokens of the layer. It starts near lambda_init."""
        # (a * b).sum() and not a @ b, which autocast would compute in bf16
        lambda_1 = torch.exp((upcast(self.lambda_q1) * self.lambda_k1).sum())
        lambda_2 = torch.exp((upcast(self.lambda_q2) * self.lambda_k2).sum())
        return lambda_1 - lambda_2 + self.lambda_init

    def subtract(self, y, v, x, state):
        y = upcast(y)  # a difference of two nearly equal numbers
        return y[:, 0::2] - self.lam(x) * y[:, 1::2]


class DiffV2(Diff):
    """The second version: softmax's keys and values, and two queries, 2n and 2n+1, for head n.

    lambda = sigmoid(x W), a number for each head and token. No norm, and no lambda_init.
    """

    heads_per_value = 1
    usual_subln = 0.0

    @staticmethod
    def usual_mlp_width(C, H):  # for C (C + h) more parameters here. An MLP has 3 C a channel
        return max(8, Softmax.usual_mlp_width(C, H) - round((C + H) / 3))

    def make_parameters(self, depth):
        C = self.config.n_embd
        self.q_proj = nn.Linear(C, 2 * C, bias=False)
        self.lambda_proj = nn.Linear(C, self.h, bias=False)

    def lam(self, x):
        return upcast(self.lambda_proj(x)).sigmoid().mT[..., None]  # (B, h, T, 1), first near 1/2


class Linear(Softmax):
    """A_ij = (R_i phi(q_i)) . (R_j phi(k_j)) / z_i, see linear_map."""

    state_grows = False
    phi = staticmethod(phi)  # a class of yours may have another one, whose values are positive

    def attend(self, q, k, v, x, rope, state):
        q, k = self.phi(q), self.phi(k)
        Z = upcast(k).cumsum(2) + state.get("Z", 0)  # the sum of the keys so far, (B, H, T, d)
        state["Z"] = Z[:, :, -1:]
        z = (upcast(q) * Z).sum(-1, keepdim=True) + 1e-12  # (B, H, T, 1), never 0
        # z_i is the same for all of row i of the map, so we divide the query by it
        q, k = self.fold(rotate(q, rope) / z, rotate(k, rope), x)
        return linear_attention(q, k, v, state)

    def fold(self, q, k, x):
        """Queries and keys of one attention that does the work of all maps. Here there is one."""
        return q, k

    def weights(self, q, k, rope):
        return linear_map(self.phi(q), self.phi(k), rope)


class LinearAverage(Linear):  # A - lambda U, as in SoftmaxAverage
    make_parameters = SoftmaxAverage.make_parameters
    lam = SoftmaxAverage.lam
    subtract = SoftmaxAverage.subtract


class DiffLinear(Linear):
    """A = A_1 - lambda A_2, two linear maps, which fold into one linear attention."""

    heads_per_value = 2
    usual_subln = 1.0
    make_parameters = Diff.make_parameters
    lam = Diff.lam

    def fold(self, q, k, x):
        """q_1 . k_1 - lambda q_2 . k_2 = [q_1, -lambda q_2] . [k_1, k_2]

        Each q is divided by its z already. So a difference of two linear maps is one such map, with
        twice the features. (Softmax can't do that: the exp of a sum is a product, not a sum.)
        """
        q = torch.cat((q[:, 0::2], -self.lam(x) * q[:, 1::2]), dim=-1)  # (B, h, T, 2d)
        k = torch.cat((k[:, 0::2], k[:, 1::2]), dim=-1)  # (B, h, T, 2d)
        return q, k

    def map(self, x):
        A = super().map(x)  # (B, H, T, T)
        return A[:, 0::2] - self.lam(x) * A[:, 1::2]


Attention = Softmax  # what an arm of your own starts from, with a line more in this table
ATTENTION = {
    "softmax": Softmax,
    "softmax_average": SoftmaxAverage,
    "diff": Diff,
    "diff_v2": DiffV2,
    "linear": Linear,
    "linear_average": LinearAverage,
    "diff_linear": DiffLinear,
}

# ---- the GPT

@dataclass
class GPTConfig:
    """The settings of a model, by default GPT-2 small's. ValueError for a model that can't be."""

    attn: str = "softmax"  # kind of attention ("arm"), a name in ATTENTION
    n_layer: int = 12  # blocks
    n_head: int = 12  # heads; diff and diff_linear have half as many, twice as wide
    n_embd: int = 768  # channels
    block_size: int = 1024  # tokens of a training sequence
    vocab_size: int = 50257  # of the tokenizer
    mlp_width: int | None = None  # channels in the MLP (8/3 n_embd; less for diff_v2)
    rope_theta: float = 10000.0  # base of the rotary embedding's angles, 0 for no rotation
    subln: float | None = None  # initial weight of the heads' norm, 0: none (by the arm)
    kernel: Literal["sdpa", "flash_attn", "map"] = "sdpa"  # what softmax's A V calls; map: slow

    def __post_init__(self):
        if self.attn not in ATTENTION:
            arms = ", ".join(ATTENTION)
            raise ValueError(f"attn is {self.attn!r} (yours? run its file), and not one of {arms}")
        arm = ATTENTION[self.attn]  # which may be any module: hence getattr
        multiple = getattr(arm, "heads_per_value", 1)
        if self.n_head < 1 or self.n_head % multiple != 0:
            raise ValueError(f"n_head must be a multiple of {multiple}, not {self.n_head}")
        if self.n_embd < 1 or self.n_embd % (2 * self.n_head) != 0:  # the rotation turns pairs
            raise ValueError(f"n_embd must be a multiple of {2 * self.n_head}, not {self.n_embd}")
        if self.subln is None:
            self.subln = getattr(arm, "usual_subln", 0.0)
        if self.mlp_width is None:
            usual = getattr(arm, "usual_mlp_width", Softmax.usual_mlp_width)
            self.mlp_width = usual(self.n_embd, self.n_head)


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
        self.attn = ATTENTION[config.attn](config, depth)
        self.norm1 = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        self.norm2 = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        self.mlp = MLP(config.n_embd, config.mlp_width)
        # a layer of your own may do without the angles and without a state
        parameters = inspect.signature(self.attn.forward).parameters
        self.takes = [name for name in ("rope", "state") if name in parameters]

    def forward(self, x, rope, state):
        inputs = dict(rope=rope, state=state)
        x = x + self.attn(self.norm1(x), **{name: inputs[name] for name in self.takes})
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The whole model. T may be anything, even more than block_size."""

    def __init__(self, config, seed=1337):
        super().__init__()
        self.config = config
        self.extra = {}  # what was saved with the model, see load
        rows = math.ceil(config.vocab_size / 64) * 64  # matmuls are faster so
        self.wte = nn.Embedding(rows, config.n_embd)  # it is the output layer, too
        self.blocks = nn.ModuleList(Block(config, depth) for depth in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        self.draw_parameters(seed)

    @torch.no_grad()
    def draw_parameters(self, seed):
        """Draw the embedding, the lambda vectors, and all that is named ..._proj.

        Each has a generator seeded by its name, so what two arms share starts with the same bits.
        The std is nn.Linear's. In small models GPT-2's 0.02 would be too small: all maps were flat.
        """
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
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
            p.copy_(torch.randn(p.shape, generator=generator) * std)

    def forward(self, idx, targets=None, state=None):
        """idx, targets (B, T) int64. Returns (logits, loss).

        With targets: the logits (B, T, vocab_size), detached, and the mean loss in nats. Without:
        the logits of the last token alone, (B, 1, vocab_size), and None.
        state: a dict, {} at first, to pass with each next part of a text that comes in parts.
        """
        state = {} if state is None else state
        start = state.get("length", 0)
        layer_states = state.setdefault("layers", [{} for _ in self.blocks])
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
        return logits.detach(), loss  # attached they would keep the graph of the whole step

    @torch.inference_mode()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Yields the next token of every row of idx (B, T), (B,) int64, max_new_tokens times.

        temperature: 0 takes the likeliest token. top_k: choose among the k likeliest only.
        """
        is_limited = getattr(self.blocks[0].attn, "state_grows", True)
        if is_limited:
            idx = idx[:, -self.config.block_size :]
        state, new = {}, idx  # new: the tokens that the state has not seen
        for _ in range(max_new_tokens):
            logits, _ = self(new, state=state) if "state" in self.blocks[0].takes else self(idx)
            new = next_token(logits[:, -1], temperature, top_k, generator)  # (B, 1)
            yield new[:, 0]
            idx = torch.cat((idx, new), dim=1)
            if is_limited and idx.shape[1] > self.config.block_size:
                # no training sequence was as long. We read the newer half of the text anew
                idx = idx[:, -max(1, self.config.block_size // 2) :]
                state, new = {}, idx

    def save(self, path, **extra):
        """Write the model and extra, tensors and plain values. A kill leaves the old file whole."""
        config = {f.name: getattr(self.config, f.name) for f in fields(GPTConfig)}
        torch.save(dict(config=config, model=self.state_dict(), **extra), f"{path}.tmp")
        os.replace(f"{path}.tmp", path)

    @classmethod
    def load(cls, path, device="cpu", kernel="sdpa"):
        """The model that save() wrote, in eval mode, with what else was saved in its .extra.

        No code in the file is run. ValueError if it is no checkpoint that this model.py can read.
        """
        try:
            extra = torch.load(path, map_location=device, weights_only=True)
            model = cls(GPTConfig(**extra.pop("config") | dict(kernel=kernel)))
            model.load_state_dict(extra.pop("model"))
        except Exception as e:  # a file can be wrong in many ways
            raise ValueError(f"{path} can't be loaded: {e!r:.160}") from e
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
