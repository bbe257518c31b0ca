"""
Four attentions in one GPT, each written in three forms.

                one map         the difference of two maps
    softmax     softmax         diff
    linear      linear          diff_linear

diff is the Differential Transformer's (arXiv 2410.05258, "the paper" below), linear that of Transformers are RNNs
(arXiv 2006.16236), diff_linear the same difference of two linear maps.
Attention multiplies the values V by a causal T x T matrix A, "the map". Everything below computes A V:
    the map    A itself, O(T^2), reads like the equation: to look at, to teach, to test
    the fast   A V without ever holding A: to train
    the step   one token at a time from a state: to sample

Shapes: B batch, T time, C channels (n_embd), H heads of the softmax model (n_head), d = C/H.
q and k are (B, H, T, d) in every arm. Head j of a differential arm is made of the neighbours 2j and 2j+1 of q and k, so
it has h = H/2 heads and v is (B, H/2, T, 2d): the head count is halved, never d. In the other arms h = H.

The block around them: pre-RMSNorm, SwiGLU, rotary positions, no biases, no dropout, tied embedding.
`python model.py` shows all of it on one screen.
"""
import hashlib
import importlib.util
import math
import os
import warnings
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

NORM_EPS = 1e-5  # every RMSNorm, the head-wise one included
Z_EPS = 1e-12  # keeps a linear row's sum from being exactly zero
# tokens per chunk of the linear family's fast form: 32, 64, 128 and 256 took linear 314, 304, 291 and 354 ms, diff_linear
# 670, 363, 338 and 354 ms, so 64 and 128 are near each other (forward and backward, median of 7 in turns, T 4096, C 768,
# H 12, float32, one thread of an AMD EPYC, torch 2.13, 2026-11-21)
CHUNK = 64


@dataclass
class GPTConfig:
    """The model. Raises ValueError, naming the field and the rule, for a model that can't be built."""

    attn: str = "softmax"  # softmax | diff | linear | diff_linear
    block_size: int = 1024  # T in training, and the room in the softmax family's cache
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12  # H, of the softmax model: a differential arm has half as many, twice as wide
    n_embd: int = 768
    rope_theta: float = 10000.0  # base of the rotary angles; 0: no positions at all
    flash: bool = True  # the fast form; False: the map
    subln: bool | None = None  # RMSNorm on each head's output; None: on in the differential arms only
    lambda_init: float | None = None  # None: the paper's, by depth; the arms with one map ignore it

    def __post_init__(self):
        def check(name, ok, rule):
            if not ok:
                raise ValueError(f"{name} must be {rule}, not {getattr(self, name)!r}")

        check("attn", self.attn in list(ATTENTION), f"one of {', '.join(ATTENTION)}")
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            value = getattr(self, name)
            check(name, type(value) is int and value > 0, "a positive integer")
        H, C = self.n_head, self.n_embd
        check("n_head", self.attn in ("softmax", "linear") or H % 2 == 0, f"even for {self.attn} (pairs of heads)")
        check("n_embd", C % (2 * H) == 0 and C >= 4, f"divisible by n_head={H} into even sizes (rotary pairs), at least 4")
        check("flash", type(self.flash) is bool, "True or False")
        check("subln", self.subln is None or type(self.subln) is bool, "None, True or False")
        real = lambda x: type(x) in (int, float) and math.isfinite(x)
        check("rope_theta", real(self.rope_theta) and self.rope_theta >= 0, "a finite number, at least 0")
        check("lambda_init", self.lambda_init is None or real(self.lambda_init), "None or a finite number")


def wide(x):
    """x in float32, or wider if it is: for sums, norms and differences that bf16 would round away."""
    return x if x.element_size() >= 4 else x.float()


def rotary(position, d, theta, dtype=torch.float64):
    """cos and sin of RoFormer's angles m theta^(-2i/d), (T, d/2, 2). None when theta is 0: no rotation.

    position: (T,) integers. The angles are float64, so that position 10 million is turned as exactly as position 10;
    dtype is that of the result. arXiv 2104.09864, Eq. 15."""
    if theta == 0:
        return None
    frequency = torch.logspace(0, 2 / d - 1, d // 2, theta, dtype=torch.float64, device=position.device)  # theta^(-2i/d)
    angle = position.double()[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin()), -1).to(dtype)


def rotate(x, rope):
    """R_m x for x (B, H, T, d): turns the neighbours (x_2i, x_2i+1) as one pair (RoFormer, Eq. 34)."""
    if rope is None:
        return x
    y = wide(x).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        cos, sin = rope.unbind(-1)
        y = y * cos[..., None] + y.flip(-1) * torch.stack((-sin, sin), -1)
    else:  # a pair is a complex number: one product instead of four passes over memory, but Inductor has no code for it
        y = torch.view_as_real(torch.view_as_complex(y) * torch.view_as_complex(rope))
    return y.flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """What the four share.

    layer(x) maps (B, T, C) to (B, T, C) at positions 0..T-1, layer.map(x) is the map (B, h, T, T).
    layer.scores(q, k), (B, H, T, T), is what stands before the normalisation, in every branch: the map goes through it,
    and with layer.flash = False so does layer(x), so that a measurement can look at the scores or replace them.
    Names and shapes of the parameters are those of Microsoft's released layer, whose weights load as they are."""

    def __init__(self, config, depth):
        """depth: the layer's number counted from 0, l - 1 in the paper's 0.8 - 0.6 exp(-0.3 (l - 1)), Section 2.1."""
        super().__init__()
        C, H = config.n_embd, config.n_head
        self.n_head, self.d, self.block_size = H, C // H, config.block_size
        self.rope_theta, self.flash, self.kernel = config.rope_theta, config.flash, "sdpa"
        self.diff = config.attn in ("diff", "diff_linear")
        self.h = H // 2 if self.diff else H
        self.q_proj = nn.Linear(C, C, bias=False)
        self.k_proj = nn.Linear(C, C, bias=False)
        self.v_proj = nn.Linear(C, C, bias=False)
        self.out_proj = nn.Linear(C, C, bias=False)
        subln = self.diff if config.subln is None else config.subln
        self.subln = nn.RMSNorm(C // self.h, eps=NORM_EPS) if subln else None  # one weight for all heads
        if self.diff:
            given = config.lambda_init
            self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth) if given is None else given
            for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                setattr(self, name, nn.Parameter(0.1 * torch.randn(self.d)))

    def lambda_full(self):
        """lambda of Eq. 2, a scalar shared by the layer's heads. Sums of products, since autocast would make bf16
        of a dot product."""
        q1, k1, q2, k2 = (wide(p) for p in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2))
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lambda_init

    def difference(self, y):
        """y_1 - lambda y_2 (Eq. 1) of the branches' maps or outputs: (B, H, T, .) to (B, h, T, .).
        Cast up, because what is left is smaller than what was subtracted."""
        if not self.diff:
            return y
        return wide(y[:, 0::2]) - self.lambda_full() * wide(y[:, 1::2])

    def project(self, x):
        """x (B, T, C) to q, k (B, H, T, d) and v (B, h, T, C/h)."""
        q = self.q_proj(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
        return q, k, v

    def rope(self, x, start=0):
        """The rotation of positions start..start+T-1 for x (..., T, channels)."""
        position = start + torch.arange(x.shape[-2], device=x.device)
        return rotary(position, self.d, self.rope_theta, torch.promote_types(x.dtype, torch.float32))

    def map(self, x):
        """The map A of x (B, T, C): (B, h, T, T), zero above the diagonal, signed where it is signed.
        Of a trained model look at it in float32: bf16 rounds large scores before the softmax."""
        q, k, _ = self.project(x)
        return self.weights(q, k)

    def forward(self, x, rope=None, state=None):
        """x (B, T, C) to (B, T, C).

        state: None to train. An empty dict makes this a prefill, which fills it on the way. With a filled one x is the
        next token (T = 1), and the state moves on in place, without gradients: tensors of one size at one address, the
        number of tokens so far, (1,), among them, so that a compiled step is one graph for every position.
        rope: the rotation of x's positions, when the layers of a model share it."""
        q, k, v = self.project(x)
        if rope is None:
            rope = self.rope(q, state["T"] if state else 0)
        if state:
            y = self.step(q, k, v, rope, state)
            state["T"] += 1
        else:
            if self.flash or state is not None:
                y = self.fast(q, k, v, rope, state)
            if not self.flash:
                y = self.weights(q, k).to(v.dtype) @ v
            if state is not None:
                state["T"] = torch.tensor([x.shape[1]], device=x.device)
        # y is (B, h, T, C/h)
        if self.subln is not None:
            y = F.rms_norm(wide(y), y.shape[-1:], wide(self.subln.weight), NORM_EPS)
            if self.diff:
                y = y * (1 - self.lambda_init)  # Eq. 3
        return self.out_proj(y.transpose(1, 2).flatten(2).to(x.dtype))


KERNELS = ("sdpa", "cudnn", "efficient", "flash_attn")  # "sdpa": the backend that PyTorch chooses


def sdpa(q, k, v, kernel="sdpa"):
    """softmax(q k^T / sqrt(d)) v with the causal mask, without holding the map, by one of KERNELS.
    q, k (B, H, T, d) and v (B, h, T, d_v), each of whose heads serves H/h neighbours, to (B, H, T, d_v)."""
    d, d_v, groups = q.shape[-1], v.shape[-1], q.shape[1] // v.shape[1]
    how = dict(is_causal=True, scale=d**-0.5)
    if kernel == "cudnn" and q.shape[2] > 1:  # takes d_v = 2d, and v as it is; refuses a single key
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=groups > 1, **how)
    v = v.repeat_interleave(groups, 1) if groups > 1 else v
    if kernel == "efficient":  # takes d_v = 2d: FlashDiffAttn_1 of the paper's appendix
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, **how)
    if kernel == "flash_attn":  # (B, T, H, d), and d_v = d only, so V goes in two halves: FlashDiffAttn_2
        from flash_attn import flash_attn_func

        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = [flash_attn_func(q, k, part, softmax_scale=how["scale"], causal=True) for part in v.split(d, -1)]
        return torch.cat(y, -1).transpose(1, 2)
    if d_v > d:  # flash kernels want d_v = d, and a CPU's is 2 to 5 times slower without it: q, k with zeros behind
        q, k = F.pad(q, (0, d_v - d)), F.pad(k, (0, d_v - d))
    return F.scaled_dot_product_attention(q, k, v, **how)


def pick_kernel(model, name="auto", dtype=torch.float32):
    """Puts one of KERNELS behind the softmax family's fast form, tried first on a few tokens, backward too.

    name "auto" takes the first of a list, fastest first, that the model's device and head size and dtype, that of the
    matmuls, allow. Returns its name and why a faster one could not be had ("" if there is none); None and "" for a model
    that uses none. ValueError with the reason when a kernel asked for by name can't run: nothing falls back in silence."""
    layer, device = model.blocks[0].attn, model.wte.weight.device
    if isinstance(layer, LinearAttention) or not layer.flash:
        return None, ""
    cuda = device.type == "cuda"
    names, whys = [name], []
    if name == "auto":
        names = ["cudnn"] if cuda and torch.cuda.get_device_capability(device) >= (9, 0) else []
        names += ["efficient"] if cuda and (layer.diff or dtype == torch.float32) else []
        names += ["sdpa"]
    for kernel in names:
        with warnings.catch_warnings(record=True) as said:  # PyTorch tells its reasons as warnings
            warnings.simplefilter("always")
            try:
                if kernel != "sdpa" and not cuda:
                    raise ValueError(f"needs a CUDA device, not {device.type}")
                if kernel == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
                    raise ValueError("flash-attn not installed: pip install flash-attn==2.8.3 --no-build-isolation")
                heads = ((model.config.n_head, layer.d), (layer.h, model.config.n_embd // layer.h))
                q, v = (torch.zeros(1, h, 16, d, device=device, dtype=dtype, requires_grad=True) for h, d in heads)
                sdpa(q, q, v, kernel).sum().backward()
                break
            except (ValueError, RuntimeError, ImportError) as e:
                reasons = [str(w.message).split(" (Trig")[0] for w in said if "runtime disabled" not in str(w.message)]
                reasons = [r for r in reasons if "not used because" not in r] or str(e).splitlines()[:1]
                whys.append(f"kernel {kernel} can't run here: {reasons[-1]}")
    else:
        raise ValueError(whys[-1])
    for block in model.blocks:
        block.attn.kernel = kernel
    return kernel, "; ".join(whys)


class SoftmaxAttention(Attention):
    """softmax: A = softmax(Q K^T / sqrt(d))
    diff:    A = softmax(Q1 K1^T / sqrt(d)) - lambda softmax(Q2 K2^T / sqrt(d))     (Eq. 1)"""

    def scores(self, q, k):
        """q k^T / sqrt(d), rotated, of each branch: q, k (B, H, T, d) to (B, H, T, T)."""
        rope = self.rope(q)
        return rotate(q, rope) @ rotate(k, rope).mT / math.sqrt(self.d)

    def weights(self, q, k):
        """The map, (B, h, T, T), from q and k (B, H, T, d) as projected."""
        S = self.scores(q, k)
        S = S.masked_fill(torch.ones_like(S, dtype=torch.bool).triu(1), float("-inf"))  # no looking ahead
        return self.difference(wide(S).softmax(-1))

    def fast(self, q, k, v, rope, state):
        q, k = rotate(q, rope), rotate(k, rope)
        if state is not None:  # room for block_size keys and values
            room = (0, 0, 0, self.block_size - k.shape[2])
            state["k"], state["v"] = F.pad(k, room), F.pad(v, room)
        return self.difference(sdpa(q, k, v, self.kernel))  # (A1 - lambda A2) V = A1 V - lambda A2 V

    def step(self, q, k, v, rope, state):
        """The last row of the map, over the cache."""
        q, k = rotate(q, rope), rotate(k, rope)
        t, K, V = state["T"], state["k"], state["v"]
        compiling = torch.compiler.is_compiling()
        if not compiling:  # the filled part; a graph, whose shapes never change, takes all of it and hides the rest
            n = t.item() + 1
            if n > K.shape[2]:
                raise ValueError(f"the cache is full at block_size={K.shape[2]}: prefill again, from an empty state")
            K, V = K.narrow(2, 0, n), V.narrow(2, 0, n)
        K.index_copy_(2, t, k)
        V.index_copy_(2, t, v)
        S = q @ K.mT * self.d**-0.5  # (B, H, 1, n)
        if compiling:
            S = S.masked_fill(torch.arange(K.shape[2], device=t.device) > t, float("-inf"))
        return self.difference(wide(S).softmax(-1)).to(v.dtype) @ V


def phi(x):
    """The feature map elu(x) + 1 (arXiv 2006.16236, Eq. 7), written so that bf16 keeps its tail below x = -6."""
    return x.relu() + x.clamp(max=0).exp()


def chunkwise(q, k, v):
    """sum over j <= i of (q_i . k_j) v_j, in O(T): a masked matmul inside each chunk, and for all that came before
    it the state S = sum of k_j v_j^T. q, k (B, h, T, D), v (B, h, T, d_v) to (B, h, T, d_v), and S at T."""
    T = q.shape[2]
    q, k, v = (F.pad(x.to(v.dtype).contiguous(), (0, 0, 0, -T % CHUNK)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    inside = (q @ k.mT * q.new_ones(CHUNK, CHUNK).tril()) @ v  # (B, h, chunks, CHUNK, d_v)
    S = wide(k.mT @ v).cumsum(2)  # (B, h, chunks, D, d_v), summed in float32 up to each chunk's end
    before = F.pad(S[:, :, :-1], (0, 0, 0, 0, 1, 0)).to(v.dtype)  # up to each chunk's beginning
    return (inside + q @ before).flatten(2, 3)[:, :, :T], S[:, :, -1]


class LinearAttention(Attention):
    """linear:      A_ij = (R_i phi(q_i)) . (R_j phi(k_j)) / (sum over m <= i of phi(q_i) . phi(k_m))
    diff_linear: A1 - lambda A2 of two such maps
    Only the numerator is rotated (RoFormer, Section 3.3): entries may be negative, and rows need not sum to 1."""

    def scores(self, q, k):
        """(R phi(q)) . (R phi(k)) of each branch: q, k (B, H, T, d), as projected, to (B, H, T, T)."""
        rope = self.rope(q)
        return rotate(phi(q), rope) @ rotate(phi(k), rope).mT

    def weights(self, q, k):
        z = wide(phi(q) @ phi(k).mT).tril().sum(-1, keepdim=True) + Z_EPS
        return self.difference(wide(self.scores(q, k)).tril() / z)

    def fold(self, q, k):
        """The difference of two linear maps is one linear map with twice the features:
        q1.k1 - lambda q2.k2 = [q1, -lambda q2] . [k1, k2], from (B, H, T, d) to (B, h, T, 2d)."""
        if not self.diff:
            return q, k
        q = torch.cat((q[:, 0::2], -self.lambda_full() * q[:, 1::2]), -1)
        return q, torch.cat((k[:, 0::2], k[:, 1::2]), -1)

    def fast(self, q, k, v, rope, state):
        q, k = phi(q), phi(k)
        Z = wide(k).cumsum(2)  # (B, H, T, d)
        z = (q * Z).sum(-1, keepdim=True) + Z_EPS  # the sums of each branch's rows
        q, k = self.fold(rotate(q, rope) / z, rotate(k, rope))
        y, S = chunkwise(q, k, v)
        if state is not None:
            state["S"], state["Z"] = S.clone(), Z[:, :, -1:].clone()
        return y

    def step(self, q, k, v, rope, state):
        """Attention as a recurrent net: Z += phi(k), S += k v^T, y = q S (arXiv 2006.16236, Eq. 18 to 20)."""
        q, k = phi(q), phi(k)
        state["Z"] += wide(k)
        z = (q * state["Z"]).sum(-1, keepdim=True) + Z_EPS
        q, k = self.fold(rotate(q, rope) / z, rotate(k, rope))
        state["S"] += wide(k).mT * wide(v)
        return wide(q) @ state["S"]  # (B, h, 1, d_v)


ATTENTION = dict(softmax=SoftmaxAttention, diff=SoftmaxAttention, linear=LinearAttention, diff_linear=LinearAttention)


class SwiGLU(nn.Module):
    """(silu(x W_gate) * x W_up) W_down, int(8C/3) wide, rounded down to a multiple of 8 (arXiv 2002.05202)."""

    def __init__(self, C):
        super().__init__()
        width = int(8 * C / 3) // 8 * 8
        self.gate_proj = nn.Linear(C, width, bias=False)
        self.up_proj = nn.Linear(C, width, bias=False)
        self.down_proj = nn.Linear(width, C, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """y = x + attention(norm(x)), then y + mlp(norm(y)) (Section 2.2)."""

    def __init__(self, config, depth):
        super().__init__()
        self.norm1 = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        self.attn = ATTENTION[config.attn](config, depth)
        self.norm2 = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        self.mlp = SwiGLU(config.n_embd)

    def forward(self, x, rope, state=None):
        x = x + self.attn(self.norm1(x), rope, state)
        return x + self.mlp(self.norm2(x))


def next_token(logits, temperature, top_k, top_p, generator):
    """The next token, (B, 1) int64, from logits (B, V): see GPT.generate."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = wide(logits)
    p = ((logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)).softmax(-1)  # less is 0 in float32
    if top_k is not None or top_p is not None:  # sorting 50,000 logits takes longer than all the rest
        p, token = p.sort(-1, descending=True)
        p[:, top_k or p.shape[-1] :] = 0
        if top_p is not None:  # stays: what has less than top_p before it
            p[:, 1:][(p.cumsum(-1) - p >= top_p * p.sum(-1, keepdim=True))[:, 1:]] = 0
        p = torch.zeros_like(p).scatter_(-1, token, p)
    # what torch.multinomial does, without its checks, which wait for the device
    return (p / torch.empty_like(p).exponential_(generator=generator)).argmax(-1, keepdim=True)


class GPT(nn.Module):
    """model(idx) and model(idx, targets), both (B, T) int64 below vocab_size, give (logits, loss). Any T will do.

    Each parameter is drawn from its own generator, seeded by (seed, name): what two arms share is the same bit for
    bit. N(0, 0.02); the matrices that end a residual branch smaller by sqrt(2 n_layer); the lambdas N(0, 0.1)."""

    def __init__(self, config, seed=1337):
        super().__init__()
        self.config, self.extra = config, {}
        with torch.device("meta"):  # every parameter is drawn below, so none is drawn here
            rows = (config.vocab_size + 63) // 64 * 64  # matmuls like multiples of 64; the logits are cut back
            self.wte = nn.Embedding(rows, config.n_embd)
            self.blocks = nn.ModuleList(Block(config, depth) for depth in range(config.n_layer))
            self.norm = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        if seed is None:  # load() brings the weights
            return
        self.to_empty(device="cpu")
        for name, p in self.named_parameters():
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
            std = 0.1 if "lambda" in name else 0.02
            if "out_proj" in name or "down_proj" in name:
                std /= math.sqrt(2 * config.n_layer)
            draw = torch.randn(p.shape, generator=generator, dtype=torch.float32, device="cpu") * std
            with torch.no_grad():
                p.copy_(torch.ones(p.shape) if "norm" in name or "subln" in name else draw)

    def forward(self, idx, targets=None, state=None):
        """logits (B, T, vocab_size) and the mean loss in nats; without targets the last position's logits alone,
        (B, 1, vocab_size), and None. state: one dict per layer, empty to begin with; see Attention.forward."""
        x = self.wte(idx)
        rope = self.blocks[0].attn.rope(x, state[0].get("T", 0) if state else 0)  # the same for every layer
        for i, block in enumerate(self.blocks):
            x = block(x, rope, state and state[i])
        x = self.norm(x if targets is not None else x[:, -1:])
        logits = self.head(x)[..., : self.config.vocab_size]
        loss = None if targets is None else F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten())
        return logits, loss

    def head(self, x):
        """The tied head, x (B, T, C) to (B, T, vocab_size rounded up)."""
        return F.linear(x, self.wte.weight)

    @torch.inference_mode()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, generator=None, step=None):
        """Continues idx, (B, T) int64: yields max_new_tokens times the next token of each row, (B,) int64.

        temperature 0 takes the likeliest; top_k keeps that many; top_p the fewest whose probabilities reach it.
        A step costs the linear arms the same however long it runs. The softmax arms have room for block_size tokens (of
        a longer idx they see the last ones); when it is full they begin again from the last block_size / 2, because
        keys dropped one by one would leave behind values that still depend on them. step is what runs a step, the model
        as it is or torch.compile(model, mode="reduce-overhead"): one graph for all of them. The first next() raises
        ValueError for impossible arguments."""
        if idx.ndim != 2 or idx.shape[1] == 0:
            raise ValueError(f"idx must be (B, T) with at least one token, not {tuple(idx.shape)}")
        if not temperature >= 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
            raise ValueError(f"need temperature >= 0, top_k >= 1, 0 < top_p <= 1: {temperature=} {top_k=} {top_p=}")
        room = self.config.block_size if ATTENTION[self.config.attn] is SoftmaxAttention else 0  # 0: without end
        kept, state = idx[:, -room:], None
        for _ in range(max_new_tokens):
            if state is None or 0 < room < kept.shape[1]:  # a prefill: of all that is kept, or of its last half
                kept = kept if state is None else kept[:, -max(1, room // 2) :]
                filled = [{} for _ in self.blocks]
                logits, _ = self(kept, state=filled)
                state = state or filled
                for old, new in zip(state, filled):
                    for name, t in old.items():
                        t.copy_(new[name])
                        if step is not None:  # so that a CUDA graph may write to it: it stays where it is
                            torch._dynamo.mark_static_address(t, guard=False)
            else:
                logits, _ = (self if step is None else step)(x, state=state)
            x = next_token(logits[:, -1], temperature, top_k, top_p, generator)
            if room:
                kept = torch.cat((kept, x), 1)
            yield x[:, 0]

    def flops_per_token(self, T):
        """FLOPs to train the *softmax* model of this size on one token of a sequence of T, whatever self is: so an arm
        that does more work never shows a better MFU.

        N parameters, each in one multiply and one add forward and two of each backward: 6 N. Attention: q k^T and A V
        are 2 C T each forward, over the full T (causality not discounted), and twice that backward: 12 C T a layer.
        PaLM (arXiv 2204.02311), appendix B, and nanoGPT. The tied embedding counts once, as the head."""
        N = sum(p.numel() for name, p in self.named_parameters() if "lambda" not in name and "subln" not in name)
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * T

    def save(self, path, **extra):
        """Writes the model and extra (tensors and plain values, flat beside `config` and `model`) to path: to a
        temporary file that is flushed to the disk and renamed, so that path is always whole."""
        checkpoint = dict(config=asdict(self.config), model=self.state_dict(), **extra)
        temporary = f"{path}.tmp"
        try:
            with open(temporary, "wb") as f:
                torch.save(checkpoint, f)
                f.flush()
                os.fsync(f.fileno())
            torch.load(temporary, weights_only=True, mmap=True)  # raises here, not when it is needed
            os.replace(temporary, path)
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)

    @classmethod
    def load(cls, path, device="cpu"):
        """The model that save() wrote, on device; what else was saved is in its .extra. Runs no code from the file.
        ValueError for a file that is not ours or is cut short."""
        with open(path, "rb") as f:
            try:
                checkpoint = torch.load(f, map_location="cpu", weights_only=True)
                config, weights = checkpoint.pop("config"), checkpoint.pop("model")
                model = cls(GPTConfig(**config), seed=None)
                model.load_state_dict(weights, assign=True)
            except Exception as e:  # of a dozen classes, depending on the byte that is wrong
                why = f"{type(e).__name__}: {e}".splitlines()[0][:120]
                raise ValueError(f"{path} is not a whole checkpoint of this project ({why})") from None
        model.extra = checkpoint
        return model.to(device)


@torch.no_grad()
def demo():
    """One screen: the four arms' sizes, how near their three forms are, and their maps of a short sentence."""
    words = "the cat sat on the mat".split()
    sentence, maps = torch.tensor([[sorted(words).index(word) for word in words]]), {}
    idx = torch.randint(257, (1, 200), generator=torch.Generator().manual_seed(0))
    print("               parameters   lambda   fast - map   fast - steps   (largest in the logits of 200 tokens, float64)")
    for attn in ATTENTION:
        model = GPT(GPTConfig(attn=attn, block_size=256, vocab_size=257, n_layer=2, n_head=4, n_embd=64)).double()
        layers, state = [block.attn for block in model.blocks], [{} for _ in model.blocks]
        for layer in layers:  # at N(0, 0.02) every map is nearly flat: nothing to see
            layer.q_proj.weight *= 8
            layer.k_proj.weight *= 8
        fast, _ = model(idx, idx)
        steps = [model(idx[:, t : t + 1], state=state)[0] for t in range(idx.shape[1])]
        for layer in layers:
            layer.flash = False
        errors = [(other - fast).abs().max() for other in (model(idx, idx)[0], torch.cat(steps, 1))]
        maps[attn] = layers[0].map(model.blocks[0].norm1(model.wte(sentence)))[0, 0]
        lam = f"{layers[0].lambda_full():.3f}" if layers[0].diff else ""
        size = sum(p.numel() for p in model.parameters())
        print(f"{attn:<15}{size:>10,}{lam:>9}{errors[0]:>13.0e}{errors[1]:>15.0e}")
    for pair in (("softmax", "diff"), ("linear", "diff_linear")):
        print("\n" + "      ".join(f"{name + ', first head':<41}  sum" for name in pair))
        for i, word in enumerate(words):
            rows = [(maps[name][i, : i + 1].tolist(), maps[name][i].sum()) for name in pair]
            print("      ".join(f"{word:<5}" + f"{''.join(f'{a:6.2f}' for a in row):<36}{s:5.2f}" for row, s in rows))


if __name__ == "__main__":
    demo()
