"""
Softmax, linear and differential attention side by side in one GPT.

    softmax       softmax(Q K^T / sqrt(d)) V
    diff          Differential Transformer, arXiv 2410.05258, which we call the paper
    diff_v2       its authors' second version, https://huggingface.co/blog/microsoft/diff-attn-v2
    linear        Transformers are RNNs, arXiv 2006.16236
    diff_linear   the difference of two linear maps, which is one linear attention again

Attention multiplies the values V by a causal T x T matrix A, which we call the map: row i says how
much token i takes from each token j <= i. The difference of two maps is meant to cancel the weight
that both of them give to irrelevant tokens. Each kind of attention, an arm of our comparison, is a
class with two methods:

    make_map    A, as its paper writes it: to read, to look at, and to test the other method
    attend      A V, computed without ever holding A: this is what trains

The letters for shapes:

    here  paper     Microsoft's code
    B                           batch
    T                           tokens
    C     d_model   embed_dim   channels of a token: n_embd
    H                           maps, each with queries of its own: n_head (diff_v2: 2 n_head)
    h     h         num_heads   heads, each with values of its own: H, but H/2 for a difference
    d     d         head_dim    channels of a query and of a key: C / n_head
    d_v   2d                    channels of a value: C / h, so 2d in diff and diff_linear, else d

Five things that reimplementations of diff often get wrong. Here, as in Microsoft's code,

    1. the two maps of head n are neighbours, 2n and 2n + 1, and share a value twice as wide
    2. the rotation turns neighbouring channels, 2m and 2m + 1
    3. lambda_init counts the layers from 0
    4. the norm is over the channels of one token and one head, not over all heads nor over time.
       (The paper calls it GroupNorm. nn.GroupNorm on (B, C, T) pools over time: it sees the future)
    5. scores are divided by sqrt(d), where d is the width of a query, not that of a value

The file begins with the equations. What they are made of (rotate, phi, ...) stands below them.
"""
import math
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

NORM_EPS = 1e-5  # of every RMSNorm


class Refused(ValueError):
    """Settings or files that can't be right, in a sentence for whoever has chosen them."""


# ---- the maps

def softmax_map(q, k, rope):
    """A_ij = exp(R_i q_i . R_j k_j / sqrt(d)) / z_i for j <= i, else 0. (B, H, T, T)

    R_i, the rotary embedding, is a rotation by angles that grow with the position i. z_i is the sum
    of the row before this division, so that its weights sum to 1.
    """
    q = rotate(q, rope)  # (B, H, T, d)
    k = repeat_for_maps(rotate(k, rope), q)  # (B, H, T, d)
    with torch.autocast(q.device.type, enabled=False):  # bf16 would round large scores too much
        scores = upcast(q) @ upcast(k).mT / math.sqrt(q.shape[-1])  # (B, H, T, T)
    is_future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    return scores.masked_fill(is_future, -math.inf).softmax(-1)


def linear_map(q, k, rope):
    """A_ij = R_i phi(q_i) . R_j phi(k_j) / z_i for j <= i, else 0. (B, H, T, T)

    phi makes all features positive. z_i is the sum of phi(q_i) . phi(k_j) over j <= i, without the
    rotation, so z_i > 0 (RoFormer, arXiv 2104.09864, Section 3.3). But then a row need
    not sum to 1: in a new small model it sums to about 1/2, and a few weights are slightly below 0.
    """
    q, k = phi(q), phi(k)
    z = upcast(q @ k.mT).tril().sum(-1, keepdim=True) + 1e-12  # (B, H, T, 1), never 0
    return upcast(rotate(q, rope) @ rotate(k, rope).mT).tril() / z


# ---- the kinds of attention

class Attention(nn.Module):
    """What all kinds share. layer(x) takes (B, T, C) to (B, T, C), and layer.map(x) is A.

    A kind of your own is a subclass with a make_map, and with what else it changes:

        make_map(self, q, k, x, rope)    A, (B, h, T, T), causal. q and k are not rotated yet
        attend(self, q, k, v, x, rope)   A V, (B, h, T, d_v), faster. Without it make_map trains
        project(self, x)                 other q, k and v, which must not see later tokens
        output(self, y)                  what is done to each head's A V, (B, h, T, d_v)
        lam(self, x)                     a lambda, if your methods use one (it is logged): a number,
                                         or a tensor (h, 1, 1), or up to (B, h, T, 1)
        __init__(self, config, depth)    new weights, after super's, which sets self.d and self.h

    A parameter with two dimensions or more counts as a matrix: it decays in training, and the MLP
    gets narrower for it. So keep a vector for each head flat, (h * d,), and unflatten it in lam.
    A GPT draws all weights named ..._proj: a gate that starts at 0 needs another name.

    The parameters of diff have the names and shapes of Microsoft's MultiheadDiffAttn.
    """

    value_width = 1  # d_v / d. 2: values are twice as wide, so there are n_head / 2 heads

    def __init__(self, config, depth):
        super().__init__()
        C, n_head = config.n_embd, config.n_head
        if n_head % self.value_width != 0:
            raise Refused(f"n_head must be a multiple of {self.value_width}, not {n_head}")
        if C % (2 * n_head) != 0:  # the rotation turns pairs of channels
            raise Refused(f"n_embd must be a multiple of 2 n_head = {2 * n_head}, not {C}")
        self.config = config
        self.d = C // n_head
        self.h = n_head // self.value_width
        self.q_proj = nn.Linear(C, C, bias=False)
        self.k_proj = nn.Linear(C, C, bias=False)
        self.v_proj = nn.Linear(C, C, bias=False)
        self.out_proj = nn.Linear(C, C, bias=False)

    def forward(self, x, rope=None):
        """rope: see make_rope. A GPT makes it once for all layers."""
        if rope is None:
            rope = make_rope(self.config, x.shape[1], x.device, x.dtype)
        q, k, v = self.project(x)
        attend = self.attend_by_map if self.config.kernel == "map" else self.attend
        y = self.output(attend(q, k, v, x, rope))  # (B, h, T, d_v)
        y = y.transpose(1, 2).flatten(2)  # the heads side by side, (B, T, C)
        return self.out_proj(y.to(self.out_proj.weight.dtype))

    def project(self, x):
        """q (B, H, T, d), v (B, h, T, d_v), and k (B, H, T, d), or (B, h, T, d) in diff_v2."""
        q = self.q_proj(x).unflatten(-1, (-1, self.d)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (-1, self.d)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
        return q, k, v

    def attend_by_map(self, q, k, v, x, rope):
        A = self.make_map(q, k, x, rope).to(v.dtype)
        return A @ repeat_for_maps(v, A)  # repeated only if yours has fewer values than maps

    attend = attend_by_map  # a subclass replaces it by a fast form of the same

    def output(self, y):
        return y

    def map(self, x):
        """A of x, (B, h, T, T), to look at."""
        q, k, _ = self.project(x)
        return self.make_map(q, k, x, make_rope(self.config, x.shape[1], x.device, x.dtype))


class Softmax(Attention):
    """A = softmax(Q K^T / sqrt(d))"""

    def make_map(self, q, k, x, rope):
        return softmax_map(q, k, rope)

    def attend(self, q, k, v, x, rope):
        return softmax_attention(q, k, v, rope, self.config.kernel)


class Diff(Attention):
    """Differential attention, in the paper's equations:

        A = softmax(Q_1 K_1^T / sqrt(d)) - lambda softmax(Q_2 K_2^T / sqrt(d))            (Eq. 1)
        lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init    (Eq. 2)
        head = (1 - lambda_init) RMSNorm(A V)                                             (Eq. 3)

    The queries and keys 2n and 2n + 1 make the two maps of head n, whose values are twice as wide.

    Why not learn lambda itself? The paper makes it of products of vectors, as scores are, so that
    it learns at the pace of the other weights. In a new model the two exps nearly cancel, and
    lambda is lambda_init to within about 0.1. lambda_init is larger in deeper layers, which worked
    well in the paper's runs.

    Why Eq. 3? A row of A sums to 1 - lambda only, so A V is small, most of all where both maps are
    alike: the norm gives all heads one size. The factor 1 - lambda_init makes it smaller again, so
    that gradients are about as large as in a Transformer (the paper's reason). Still, the output of
    a head of the first layer begins with size 0.8, and softmax's, a mean of many values, with 0.2.
    """

    value_width = 2

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)  # depth: the first layer is 0
        self.subln = nn.RMSNorm(2 * self.d, eps=NORM_EPS)  # all heads share its weight
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

    def attend(self, q, k, v, x, rope):
        y = softmax_attention(q, k, v, rope, self.config.kernel)
        y = upcast(y)  # (B, H, T, d_v). The difference of two nearly equal numbers is not for bf16
        return y[:, 0::2] - self.lam(x) * y[:, 1::2]

    def output(self, y):
        return self.subln(y.to(self.subln.weight.dtype)) * (1 - self.lambda_init)  # Eq. 3


class DiffV2(Attention):
    """The second version: keys and values as in softmax, but two queries for each, 2n and 2n + 1.

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

    def attend(self, q, k, v, x, rope):
        q, k = features(q, k, rope)
        return linear_attention(q, k, v)


class DiffLinear(Diff):  # inherits its lambda, norm and wide values. Both forms are replaced
    """Eq. 1 with two linear maps, which fold into one linear attention:

        q_1 . k_1 - lambda q_2 . k_2 = [q_1, -lambda q_2] . [k_1, k_2]

    (Here q and k are features, rotated, and each q is divided by its z.) So the difference of two
    linear maps is one linear map with twice the features. Softmax can't do that: the exp of the
    joined scores would be a quotient, exp(s_1) / exp(lambda s_2), and not a difference.
    """

    def make_map(self, q, k, x, rope):
        A = linear_map(q, k, rope)  # (B, H, T, T)
        return A[:, 0::2] - self.lam(x) * A[:, 1::2]

    def attend(self, q, k, v, x, rope):
        q, k = features(q, k, rope)  # (B, H, T, d)
        q = torch.cat((q[:, 0::2], -self.lam(x) * q[:, 1::2]), dim=-1)  # (B, h, T, 2d)
        k = torch.cat((k[:, 0::2], k[:, 1::2]), dim=-1)  # (B, h, T, 2d)
        return linear_attention(q, k, v)


ATTENTION = {  # yours: ATTENTION["mine"] = Mine in myarm.py, and train.py --use=myarm
    "softmax": Softmax,
    "diff": Diff,
    "diff_v2": DiffV2,
    "linear": Linear,
    "diff_linear": DiffLinear,
}

# ---- A V without the map

def softmax_attention(q, k, v, rope, kernel="sdpa"):
    """softmax_map(q, k, rope) @ v in a kernel that holds no map, (B, H, T, d_v).

    kernel: "sdpa" is PyTorch's, which has FlashAttention in it. "flash_attn" is the package.
    """
    scale = q.shape[-1] ** -0.5
    q, k = rotate(q, rope), rotate(k, rope)
    k, v = repeat_for_maps(k, q), repeat_for_maps(v, q)
    is_hopper = q.is_cuda and torch.cuda.get_device_properties(q.device).major == 9  # H100, H200
    if kernel == "flash_attn" or not is_hopper:
        # flash kernels want queries as wide as values. (cuDNN, which we use on a Hopper, does not.)
        # Zeros change no product q . k
        q = F.pad(q, (0, v.shape[-1] - q.shape[-1]))
        k = F.pad(k, (0, v.shape[-1] - k.shape[-1]))
    if kernel == "flash_attn":
        from flash_attn import flash_attn_func
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, T, H, d_v)
        return flash_attn_func(q, k, v, softmax_scale=scale, causal=True).transpose(1, 2)
    if q.device.type == "mps":  # Apple's GPUs have a kernel of their own
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    # without this list PyTorch may silently take its MATH backend, which holds the whole map
    first = SDPBackend.CUDNN_ATTENTION if is_hopper else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel([first, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return OneLayout.apply(y) if is_hopper else y


class OneLayout(torch.autograd.Function):
    """y itself, but its gradient always lies in memory in the order (B, T, H, d_v).

    cuDNN plans a backward pass for one such order, and PyTorch uses the plan for other orders, too.
    Then the gradients of q, k and v are completely wrong, without any warning (measured on an H200
    with PyTorch 2.11; not yet looked at with 2.13; pytorch #191576).
    """

    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.transpose(1, 2).contiguous().transpose(1, 2)


def linear_attention(q, k, v, chunk=64):
    """y_i = the sum over j <= i of (q_i . k_j) v_j, in O(T) and without the map. (B, h, T, d_v)

    Without an exp around q . k, the sum over j can be taken before the query comes: y_i = q_i S_i,
    where S_i = the sum over j <= i of k_j v_j^T is a matrix, whose size does not grow. But an S for
    each token would fill the memory, and a loop over the tokens would be slow on a GPU. So the text
    is cut into chunks. A query reads its own chunk through a small map, and all earlier chunks
    through the S at their end. q and k are (B, h, T, f) with f features.
    """
    T = v.shape[2]
    # contiguous(): else torch.compile fails if T is unknown to it and no padding is needed
    q, k, v = [
        F.pad(x.to(v.dtype).contiguous(), (0, 0, 0, -T % chunk)).unflatten(2, (-1, chunk))
        for x in (q, k, v)
    ]  # (B, h, N, chunk, f) with N chunks
    S = upcast(k.mT @ v).cumsum(2)  # the sums up to the end of each chunk, (B, h, N, f, d_v)
    S = torch.cat((torch.zeros_like(S[:, :, :1]), S[:, :, :-1]), dim=2)  # and before each chunk
    y = (q @ k.mT).tril() @ v + q @ S.to(v.dtype)
    return y.flatten(2, 3)[:, :, :T]


def features(q, k, rope):
    """R phi(q) / z and R phi(k), (B, H, T, d): the products of these two are the linear map.

    z_i is the same for a whole row of the map, so we can divide the query by it. It is
    phi(q_i) . Z_i, where Z_i is the sum of phi(k_j) over j <= i.
    """
    q, k = phi(q), phi(k)
    Z = upcast(k).cumsum(2)  # (B, H, T, d)
    z = (upcast(q) * Z).sum(-1, keepdim=True) + 1e-12  # (B, H, T, 1), never 0
    return rotate(q, rope) / z, rotate(k, rope)


# ---- what both are made of

def phi(x):
    """elu(x) + 1 (2006.16236, Eq. 7), written so that bf16 does not round it to 0 below x = -6."""
    return F.relu(x) + torch.exp(x.clamp(max=0))


def make_rope(config, T, device, dtype):
    """Cosines and sines of the angles i theta^(-2m/d), for T positions i and all pairs m of
    channels: (T, d/2) each. In float64, since float32 would round the large angles of late tokens.
    """
    d = config.n_embd // config.n_head
    place = "cpu" if torch.device(device).type == "mps" else device  # which has no float64
    m = torch.arange(d // 2, device=place, dtype=torch.float64)
    frequency = config.rope_theta ** (-2 * m / d) if config.rope_theta else torch.zeros_like(m)
    angle = torch.arange(T, device=place)[:, None] * frequency
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


def repeat_for_maps(k, q):
    """Keys or values, (B, h, T, ...), of which each is repeated for the maps that share it: q has
    as many as there are maps.
    """
    times = q.shape[1] // k.shape[1]
    return k if times == 1 else k.repeat_interleave(times, dim=1)


def upcast(x):
    """bf16 to float32, for sums and differences that bf16 would round away. float64 stays."""
    return x if x.dtype.itemsize >= 4 else x.float()


# ---- the GPT

@dataclass
class GPTConfig:
    """The settings of a model, by default GPT-2 small's."""

    attn: str = "softmax"  # kind of attention, a name in ATTENTION
    n_layer: int = 12  # blocks
    n_head: int = 12  # maps (of diff_v2: pairs of maps)
    n_embd: int = 768  # channels
    block_size: int = 1024  # tokens of a training sequence
    vocab_size: int = 50257  # of the tokenizer
    mlp_width: int | None = None  # channels in the MLP (so that all have equally many weights)
    rope_theta: float = 10000.0  # base of the rotary embedding's angles, 0 for no rotation
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
            raise Refused(f"attn is {config.attn!r} (yours? name its file with --use), not one of "
                          f"{', '.join(ATTENTION)}")
        self.attn = ATTENTION[config.attn](config, depth)
        width = config.mlp_width
        if width is None:
            # 8C/3 is usual for SwiGLU, here rounded down to a multiple of 8. If the attention has
            # larger matrices than softmax's, the MLP is narrower, so that all kinds have equally
            # many parameters: a channel of it has 3C
            more = sum(p.numel() for p in self.attn.parameters() if p.ndim >= 2) - 4 * C * C
            width = max(8, 8 * C // 3 // 8 * 8 - round(more / (3 * C)))
        self.norm1 = nn.RMSNorm(C, eps=NORM_EPS)
        self.norm2 = nn.RMSNorm(C, eps=NORM_EPS)
        self.mlp = MLP(C, width)

    def forward(self, x, rope):
        x = x + self.attn(self.norm1(x), rope)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The whole model. seed: of its first weights."""

    def __init__(self, config, seed=1337):
        super().__init__()
        self.config = config
        rows = math.ceil(config.vocab_size / 64) * 64  # a multiple of 64 makes matmuls faster
        self.wte = nn.Embedding(rows, config.n_embd)  # the embedding is also the output layer
        self.blocks = nn.ModuleList(Block(config, depth) for depth in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        self.draw_parameters(seed)

    @torch.no_grad()
    def draw_parameters(self, seed):
        """Draw the embedding, the lambda vectors, and all that is named ..._proj.

        Each has a generator seeded by its name, so what two kinds of attention share starts with
        the same bits. The std is nn.Linear's. GPT-2's 0.02 is too small for small models: every map
        starts flat.
        """
        for name, p in self.named_parameters():
            kind = name.removesuffix(".weight").split(".")[-1]  # like "q_proj", "lambda_q1"
            if kind in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                std = 0.1
            elif kind == "wte" or kind.endswith("_proj"):
                std = 1 / math.sqrt(3 * p.shape[-1])
            else:  # the weight of a norm, or a parameter of a class of yours
                continue
            if kind in ("out_proj", "down_proj"):  # they add up in the residual stream (GPT-2)
                std /= math.sqrt(2 * self.config.n_layer)
            digest = sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
            p.copy_(torch.randn(p.shape, generator=generator) * std)

    def forward(self, idx, targets=None):
        """idx, targets (B, T) int64. Returns (logits, loss).

        With targets: the logits (B, T, vocab_size), detached, and the mean loss in nats. Without:
        the logits of the last token alone, (B, 1, vocab_size), and None.
        """
        x = self.wte(idx)  # (B, T, C)
        rope = make_rope(self.config, x.shape[1], x.device, x.dtype)
        for block in self.blocks:
            x = block(x, rope)
        x = self.norm(x[:, -1:] if targets is None else x)
        logits = F.linear(x, self.wte.weight)[..., : self.config.vocab_size]
        if targets is None:
            return logits, None
        loss = F.cross_entropy(upcast(logits).flatten(0, 1), targets.flatten())
        return logits.detach(), loss  # else the logits would keep the whole graph in memory

    @torch.inference_mode()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Yields the next token of every row of idx (B, T), (B,) int64, max_new_tokens times.

        Each time the last block_size tokens are read anew. A cache would be faster to run, and
        much longer to read: every attend would have a state.
        """
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.config.block_size :])
            new = next_token(logits[:, -1], temperature, top_k, generator)  # (B, 1)
            yield new[:, 0]
            idx = torch.cat((idx, new), dim=1)

    def save(self, path, **extra):
        """Write the model and extra, tensors and plain values. A kill leaves the old file whole."""
        config = {f.name: getattr(self.config, f.name) for f in fields(GPTConfig)}
        torch.save(dict(config=config, model=self.state_dict(), **extra), f"{path}.tmp")
        Path(f"{path}.tmp").replace(path)

    @classmethod
    def load(cls, path, device="cpu"):
        """The model that save() wrote, in eval mode, and a dict with what else was saved."""
        extra = read_checkpoint(path)
        model = cls(extra.pop("config"))
        model.load_state_dict(extra.pop("model"))
        return model.to(device).eval(), extra


def read_checkpoint(path):
    """The dict that GPT.save wrote. A tensor is read when it is used. No code in it is run."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        saved["config"] = GPTConfig(**saved["config"])
    except Exception as e:  # a file can be wrong in many ways
        why = f"{type(e).__name__}: {e}".splitlines()[0]
        raise Refused(f"{path} can't be read as a checkpoint ({why})") from e
    if saved["config"].kernel == "flash_attn":
        saved["config"].kernel = "sdpa"  # the same numbers, and no package is needed to sample
    return saved


def next_token(logits, temperature=1.0, top_k=None, generator=None):
    """Choose the next token by the logits (B, vocab_size): (B, 1) int64."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = upcast(logits) / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < least, -math.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
