"""
Four attentions in one GPT, each written in three forms.

                one map         the difference of two maps
    softmax     softmax         diff            (Differential Transformer, arXiv 2410.05258, "the paper" below)
    linear      linear          diff_linear     (linear: Transformers are RNNs, arXiv 2006.16236)

Attention multiplies the values V by a causal T x T matrix A, "the map". One map is made like this:
    A_ij = w_ij D_ij / z_i      weights w, times the mask D, divided by the row sums z_i = sum over j of w_ij D_ij
    w_ij = exp(q_i . k_j / sqrt(d)) (softmax) or phi(q_i) . phi(k_j) (linear); RoPE turns q and k, but not in linear's z
    D_ij = 1 for j <= i, else 0; with `decay` D_ij = gamma^(i - j) for j <= i, so that a head forgets
A differential arm has A = A_1 - lambda A_2, two such maps, its branches, and a learned lambda in each layer.

Three forms: the map, A itself, O(T^2), to look at and to test; the fast form, A V without A (with decay a softmax
kernel still gets log D), to train; the step, one token at a time from a state, to sample.

Shapes: B batch, T time, C channels (n_embd), H heads of the softmax model (n_head), d = C/H. q and k are (B, H, T, d)
in every arm. Heads 2n and 2n+1 are the branches of differential head n and share one value: h = H/2 and v is
(B, h, T, 2d). The head count is halved, never d. In the other arms h = H and v is (B, h, T, d).
"""
import hashlib
import math
import os
import zipfile
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

NORM_EPS = 1e-5  # every RMSNorm, the head-wise one included
Z_EPS = 1e-12  # keeps a linear row's sum from being exactly zero
CHUNK = 64  # tokens per chunk of the linear arms' fast form

@dataclass
class GPTConfig:
    """The model. ValueError for one that can't be built."""
    attn: str = "softmax"  # a name in ATTENTION
    block_size: int = 1024  # T in training, and the room in the softmax arms' cache
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12  # H, of the softmax model: a differential arm has half as many, twice as wide
    n_embd: int = 768
    rope_theta: float = 10000.0  # base of the rotary angles; 0: no positions at all
    flash: bool = True  # the fast form; False: the map
    decay: bool = False  # heads forget, each at a fixed rate: see Attention.rate
    subln: bool | None = None  # RMSNorm on each head's output; None: on in the differential arms only
    subln_init: float = 1.0  # the initial weight of that norm
    lambda_init: float | None = None  # None: the paper's, by depth; the arms with one map ignore it

    def __post_init__(self):
        if self.attn not in ATTENTION:
            raise ValueError(f"attn must be one of {', '.join(ATTENTION)}, not {self.attn!r}")
        sizes = self.block_size, self.vocab_size, self.n_layer, self.n_head, self.n_embd
        if min(sizes) < 1 or self.n_head % ATTENTION[self.attn].branches or self.n_embd % (2 * self.n_head):
            raise ValueError(f"sizes must be >= 1, n_head even in a diff arm, n_embd a multiple of 2 n_head: {self}")

def wide(x): return x if x.element_size() >= 4 else x.float()  # for sums and norms that bf16 would round away

def rotate(x, R):
    """R x for x (B, H, T, d): turns the neighbours (x_2i, x_2i+1) as one pair (RoFormer, arXiv 2104.09864, Eq. 34)."""
    a, b = wide(x).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = R.unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)

def log_mask(rate, T, rows=None):
    """log D for gamma = exp(-rate), rate (n, 1, 1): -(i - j) rate where j <= i, else -inf. (n, T, T), or only the rows
    in `rows`. Never above 0, so that no power of gamma overflows."""
    j = torch.arange(T, device=rate.device)
    distance = (j if rows is None else rows)[:, None] - j
    return (-rate * distance).masked_fill(distance < 0, -math.inf)

class Attention(nn.Module):
    """What the four share; a class below adds scores, A, fast, begin and row. layer(x) maps (B, T, C) to (B, T, C).
    layer.map(x) is its map, (B, h, T, T): look at it in float32, bf16 rounds large scores. R is layer.rotation(x).
    The map, and layer(x) without the fast form, go through layer.scores(q, k, R), (B, H, T, T), what stands before mask
    and normalisation: a measurement can look at the scores or replace them. Parameters are named like Microsoft's."""
    branches, narrower = 1, 0  # maps per head; by how much the MLP is narrower, to pay for an arm with more parameters

    def __init__(self, config, depth):
        super().__init__()
        C, H = config.n_embd, config.n_head
        self.config, self.n_head, self.h, self.d = config, H, H // self.branches, C // H
        self.flash, self.kernel, self.subln_scale = config.flash, "sdpa", 1.0
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(C, C, bias=False) for _ in range(4))
        subln = self.branches == 2 if config.subln is None else config.subln
        self.subln = nn.RMSNorm(C // self.h, eps=NORM_EPS) if subln else None  # one weight for all heads

    def map(self, x): return self.A(*self.project(x)[:2], self.rotation(x))
    def forward(self, x, R=None): return self.attend(*self.project(x), self.rotation(x) if R is None else R)

    def prefill(self, x, R, state):
        """Like forward. Also fills the dict `state` for step: begin's tensors, and "T", the number of tokens so far."""
        q, k, v = self.project(x)
        state.update(self.begin(k, v, R), T=torch.tensor([x.shape[1]], device=x.device))
        return self.attend(q, k, v, R)

    def step(self, x, R, state):
        """The next token, x (B, 1, C), R: self.rotation(x, state["T"]). The state's tensors keep size and address."""
        q, k, v = self.project(x)
        y = self.row(q, k, v, R, state)
        state["T"] += 1
        return self.out(y, v.dtype)

    def project(self, x):  # to q, k (B, H, T, d), v (B, h, T, C/h)
        q, k = (p(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj))
        return q, k, self.v_proj(x).unflatten(-1, (self.h, -1)).transpose(1, 2)

    def attend(self, q, k, v, R):
        return self.out(self.fast(q, k, v, R) if self.flash else self.A(q, k, R).to(v.dtype) @ v, v.dtype)

    def out(self, y, dtype):  # of y (B, h, T, C/h)
        y = y if self.subln is None else self.subln(y.type_as(self.subln.weight)) * self.subln_scale
        return self.out_proj(y.transpose(1, 2).flatten(2).to(dtype))

    def rotation(self, x, start=0):
        """R: cos and sin of RoFormer's angles m theta^(-2i/d), (T, d/2, 2), for the positions m of x (B, T, C), from
        start on. Angles are float64, so that position 10 million is turned as exactly as position 10."""
        like, theta = dict(dtype=torch.float64, device=x.device), self.config.rope_theta
        m, i = start + torch.arange(x.shape[1], **like), torch.arange(self.d // 2, **like)
        angle = m[:, None] * (theta ** (-2 * i / self.d) if theta else 0 * i)
        return torch.stack((angle.cos(), angle.sin()), -1).to(wide(x[:0]))

    def rate(self, x):
        """-log gamma = 1/span of each head of q and k, (H, 1, 1); 0 without decay. The spans of the h heads go from 4
        to 2 block_size tokens, evenly spaced in log. The branches of a head share one: `fold` needs that."""
        span = torch.logspace(2, math.log2(2 * self.config.block_size), self.h, 2, dtype=torch.float64, device=x.device)
        return (self.config.decay / span.to(wide(x[:0]))).repeat_interleave(self.branches)[:, None, None]

class Softmax(Attention):
    """A = softmax(Q K^T / sqrt(d) + log D)"""
    def scores(self, q, k, R): return rotate(q, R) @ rotate(k, R).mT * self.d**-0.5  # (B, H, T, T)
    def A(self, q, k, R): return (wide(self.scores(q, k, R)) + log_mask(self.rate(q), q.shape[2])).softmax(-1)

    def fast(self, q, k, v, R):
        return sdpa(rotate(q, R), rotate(k, R), v, self.rate(q) if self.config.decay else None, self.kernel)

    def begin(self, k, v, R):
        room = (0, 0, 0, self.config.block_size - k.shape[2])
        return dict(k=F.pad(rotate(k, R), room), v=F.pad(v, room))  # the cache

    def row(self, q, k, v, R, state):
        """The last row of each branch's map, over the whole cache: log D hides what is not filled yet."""
        t, K, V = state["T"], state["k"], state["v"]
        K.index_copy_(2, t, rotate(k, R))  # IndexError on a CPU when the cache is full
        V.index_copy_(2, t, v)
        with torch.autocast(q.device.type, enabled=False):  # scores in float32, as in the fast form
            scores = wide(rotate(q, R)) @ wide(K).mT * self.d**-0.5  # (B, H, 1, block_size)
        A = (scores + log_mask(self.rate(q), K.shape[2], t)).softmax(-1).view(len(V), self.h, self.branches, -1)
        return (A.to(V.dtype) @ V).flatten(1, 2).unsqueeze(2)  # (B, H, 1, C/h): the branches of a head share its V

class Difference:
    """Stands before Softmax or Linear in a class: two branches a head, A_1 - lambda A_2, and a norm that is scaled."""
    branches = 2

    def __init__(self, config, depth):
        super().__init__(config, depth)  # depth is l - 1 in the paper: it counts layers from 1, in Section 2.1
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth) if config.lambda_init is None else config.lambda_init
        self.subln_scale = 1 - self.lambda_init  # Eq. 3
        lambdas = (nn.Parameter(torch.empty(self.d)) for _ in range(4))
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = lambdas

    def lambda_full(self):
        """lambda of Eq. 2, shared by the layer's heads. Sums of products: autocast would make bf16 of a dot product."""
        q1, k1, q2, k2 = (wide(p) for p in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2))
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lambda_init

    def minus(self, y): return wide(y[:, 0::2]) - self.lambda_full() * wide(y[:, 1::2])  # of maps or outputs
    def A(self, *args): return self.minus(super().A(*args))

class Diff(Difference, Softmax):
    """A = A_1 - lambda A_2 = softmax(Q_1 K_1^T / sqrt(d)) - lambda softmax(Q_2 K_2^T / sqrt(d))     (Eq. 1)"""
    def fast(self, *args): return self.minus(super().fast(*args))  # (A_1 - lambda A_2) V = A_1 V - lambda A_2 V
    def row(self, *args): return self.minus(super().row(*args))

def phi(x): return x.relu() + x.clamp(max=0).exp()  # elu(x) + 1 (2006.16236, Eq. 7), its tail kept in bf16

def chunkwise(q, k, v, rate):
    """sum over j <= i of gamma^(i - j) (q_i . k_j) v_j in O(T), plus L @ S in O((T/CHUNK)^2). Inside a chunk the masked
    product; for what was before it the earlier chunks' states S = sum of k_j v_j^T, each faded by its distance.
    q, k (B, n, T, f), v (B, n, T, d_v), rate (n, 1, 1), to (B, n, T, d_v), for any number n of heads."""
    T, N = v.shape[2], -(-v.shape[2] // CHUNK)
    q, k, v = (F.pad(x.to(v.dtype).contiguous(), (0, 0, 0, -T % CHUNK)).unflatten(2, (N, CHUNK)) for x in (q, k, v))
    # earlier chunks: gamma^(i - j) = D's last row (j to its chunk's end), L (to the token before i's), fade (to i)
    D = log_mask(rate, CHUNK).exp()[:, None].to(v.dtype)
    L = log_mask(CHUNK * rate, N, torch.arange(-1, N - 1, device=v.device)).exp().to(v.dtype)  # row n: chunks 0 to n-1
    fade = (-rate * torch.arange(1, CHUNK + 1, device=v.device)[:, None]).exp()[:, None].to(v.dtype)
    S = (k * D[:, :, -1, :, None]).mT @ v  # (B, n, N, f, d_v), at the chunk's end
    before = (L @ S.flatten(3)).reshape(S.shape)
    return (((q @ k.mT) * D) @ v + (q * fade) @ before).flatten(2, 3)[:, :, :T]

class Linear(Attention):
    """A_ij = (R_i phi(q_i)) . (R_j phi(k_j)) D_ij / z_i,   z_i = sum over j <= i of phi(q_i) . phi(k_j) D_ij
    Only the numerator is rotated, so z > 0 (RoFormer, Section 3.3). Entries may be negative, rows need not sum to 1."""
    def scores(self, q, k, R): return rotate(phi(q), R) @ rotate(phi(k), R).mT  # (B, H, T, T)
    def fold(self, q, k): return q, k  # makes one of a head's branches, (B, H, T, d) to (B, h, T, branches d)

    def A(self, q, k, R):
        D = log_mask(self.rate(q), q.shape[2]).exp()
        z = (wide(phi(q) @ phi(k).mT) * D).sum(-1, keepdim=True) + Z_EPS
        return wide(self.scores(q, k, R)) * D / z

    def fast(self, q, k, v, R):
        q, k, rate, one = phi(q), phi(k), self.rate(q), q.new_ones(1, 1, q.shape[2], 1)
        Z = chunkwise(one, one, k, rate)  # with q = k = 1 and v = k it is the decayed running sum of k
        z = (wide(q) * Z).sum(-1, keepdim=True) + Z_EPS
        q, k = self.fold(rotate(q, R) / z, rotate(k, R))
        return chunkwise(q, k, v, rate[:: self.branches])

    def begin(self, k, v, R):
        """S = sum of gamma^(T-1-j) (R_j phi(k_j)) v_j^T, (B, h, ., C/h), and Z = sum of gamma^(T-1-j) phi(k_j)."""
        k, age = wide(phi(k)), torch.arange(k.shape[2] - 1, -1, -1, device=k.device)
        fade = (-self.rate(k) * age[:, None]).exp()  # (H, T, 1)
        folded = self.fold(k, rotate(k, R) * fade)[1]  # its q is not needed
        with torch.autocast(k.device.type, enabled=False):  # float32, since the steps add to it
            return dict(S=folded.mT @ wide(v), Z=(k * fade).sum(2, keepdim=True))

    def row(self, q, k, v, R, state):
        """A recurrent net (arXiv 2006.16236, Eq. 18 to 20): Z <- gamma Z + phi(k), S <- gamma S + k v^T, y = q S."""
        q, k, gamma = phi(q), phi(k), (-self.rate(q)).exp()
        state["Z"].mul_(gamma).add_(k)
        z = (q * state["Z"]).sum(-1, keepdim=True) + Z_EPS
        q, k = self.fold(rotate(q, R) / z, rotate(k, R))
        state["S"].mul_(gamma[:: self.branches]).add_(wide(k).mT * wide(v))
        return (wide(q).mT * state["S"]).sum(2, keepdim=True)  # (B, h, 1, C/h), in float32 under autocast too

class DiffLinear(Difference, Linear):
    """A = A_1 - lambda A_2 of two linear maps. 1/z belongs to the row i, lambda to the layer: both move into q. So
    this is one linear attention with signed features of twice the size, q and k after phi and rotation:
    A_ij = [q_1/z_1, -lambda q_2/z_2]_i . [k_1, k_2]_j D_ij. So `fold` is all that the fast form and the step need."""
    def fold(self, q, k):
        q = torch.cat((q[:, 0::2], -self.lambda_full() * q[:, 1::2]), -1)
        return q, torch.cat((k[:, 0::2], k[:, 1::2]), -1)

ATTENTION = dict(softmax=Softmax, diff=Diff, linear=Linear, diff_linear=DiffLinear)

class Block(nn.Module):
    """y = x + attention(norm(x)), then y + SwiGLU(norm(y)) with SwiGLU(x) = (silu(x W_g) * x W_u) W_d (Section 2.2)."""
    def __init__(self, config, depth):
        super().__init__()
        C, self.attn = config.n_embd, ATTENTION[config.attn](config, depth)
        width = int(8 * C / 3) // 8 * 8 - self.attn.narrower
        self.norm1, self.norm2 = nn.RMSNorm(C, eps=NORM_EPS), nn.RMSNorm(C, eps=NORM_EPS)
        self.mlp = nn.ModuleDict({name: nn.Linear(C, width, bias=False) for name in ("gate_proj", "up_proj")})
        self.mlp["down_proj"] = nn.Linear(width, C, bias=False)

    def forward(self, x, attention, *args):
        """attention: self.attn, self.attn.prefill or self.attn.step; args: what it takes beside x."""
        x = x + attention(self.norm1(x), *args)
        y, mlp = self.norm2(x), self.mlp
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))

class GPT(nn.Module):
    """model(idx) and model(idx, targets), both (B, T) int64 below vocab_size, give (logits, loss). Any T will do.
    Each parameter is drawn from its own generator, seeded by (seed, name): what two arms share is the same bit for
    bit. N(0, 0.02); the matrices that end a residual branch smaller by sqrt(2 n_layer); the lambdas N(0, 0.1)."""
    def __init__(self, config, seed=1337):
        super().__init__()
        self.config, self.extra = config, {}
        with torch.device("meta"):  # the weights are drawn below, or loaded
            self.wte = nn.Embedding((config.vocab_size + 63) // 64 * 64, config.n_embd)  # matmuls like multiples of 64
            self.blocks = nn.ModuleList(Block(config, depth) for depth in range(config.n_layer))
            self.norm = nn.RMSNorm(config.n_embd, eps=NORM_EPS)
        weights = {} if seed is None else {name: self.draw(name, p, seed) for name, p in self.named_parameters()}
        self.load_state_dict(weights, strict=seed is not None, assign=True)

    def draw(self, name, p, seed):
        if "norm" in name or "subln" in name:
            return torch.full(p.shape, self.config.subln_init if "subln" in name else 1.0)
        std = 0.1 if "lambda" in name else 0.02
        if "out_proj" in name or "down_proj" in name:
            std /= math.sqrt(2 * self.config.n_layer)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        return torch.randn(p.shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))) * std

    def forward(self, idx, targets=None):
        """logits (B, T, vocab_size), detached, and the mean loss in nats; without targets the last logits and None."""
        x = self.wte(idx)
        R = self.blocks[0].attn.rotation(x)  # the same for every layer
        for block in self.blocks:
            x = block(x, block.attn, R)
        if targets is None:
            return self.logits(x[:, -1:]), None
        logits = self.logits(x)
        return logits.detach(), F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten())

    def prefill(self, idx):
        """The last logits, (B, 1, vocab_size), and the state for `step`, a dict a layer. Softmax: T <= block_size."""
        x, state = self.wte(idx), [{} for _ in self.blocks]
        R = self.blocks[0].attn.rotation(x)
        for block, s in zip(self.blocks, state):
            x = block(x, block.attn.prefill, R, s)
            for t in s.values():
                torch._dynamo.mark_static_address(t, guard=False)  # so that a CUDA graph of the step may write to it
        return self.logits(x[:, -1:]), state

    def step(self, idx, state):
        """The logits, (B, 1, vocab_size), after one more token, idx (B, 1). The state moves on in place."""
        x = self.wte(idx)
        R = self.blocks[0].attn.rotation(x, state[0]["T"])
        for block, s in zip(self.blocks, state):
            x = block(x, block.attn.step, R, s)
        return self.logits(x)

    def logits(self, x): return F.linear(self.norm(x), self.wte.weight)[..., : self.config.vocab_size]

    @torch.inference_mode()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, generator=None, step=None):
        """Yields max_new_tokens times the next token, (B,) int64, of each row of idx, (B, T). temperature 0 takes the
        likeliest; top_k keeps so many, top_p the smallest set that reaches this probability. step: it, compiled."""
        if not temperature >= 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
            raise ValueError(f"need temperature >= 0, top_k >= 1, 0 < top_p <= 1: {temperature=} {top_k=} {top_p=}")
        room = self.config.block_size if isinstance(self.blocks[0].attn, Softmax) else 0  # 0: no limit
        kept, state = idx[:, -room:], None
        for _ in range(max_new_tokens):
            if 0 < room < kept.shape[1]:  # what deeper layers keep depends on dropped tokens
                kept, state = kept[:, -max(1, room // 2) :], None
            if state is None:
                logits, state = self.prefill(kept)
            else:
                logits = (step or self.step)(x, state)
            x = next_token(logits[:, -1], temperature, top_k, top_p, generator)
            kept = torch.cat((kept, x), 1)
            yield x[:, 0]

    def save(self, path, **extra):
        """Writes the model and extra (tensors and plain values) so that path is always whole; OSError if it can't."""
        try:
            with open(f"{path}.tmp", "wb") as f:
                torch.save(dict(config=asdict(self.config), model=self.state_dict(), **extra), f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(f"{path}.tmp", path)
        except RuntimeError as e:  # torch.save's on a full disk
            os.remove(f"{path}.tmp")
            raise OSError(f"{path} could not be written, is the disk full? ({e})".splitlines()[0]) from None

    @classmethod
    def load(cls, path, device="cpu"):
        """The model that save() wrote, on device; what else was saved is in its .extra. Runs no code from the file.
        ValueError for a file that is not ours, cut short or damaged, or whose weights are not finite."""
        os.stat(path)  # a missing file is an OSError
        try:
            if zipfile.ZipFile(path).testzip():
                raise ValueError("a checksum is wrong")
            extra = torch.load(path, map_location="cpu", weights_only=True)
            model = cls(GPTConfig(**extra.pop("config")), seed=None)
            model.load_state_dict(extra.pop("model"), assign=True)
            if not all(p.isfinite().all() for p in model.parameters()):
                raise ValueError("weights that are not finite")
        except Exception as e:  # of a dozen classes, depending on the byte that is wrong
            raise ValueError(f"{path} is not a whole checkpoint of this project: {e!r:.120}") from None
        model.extra = extra
        return model.to(device)

def next_token(logits, temperature, top_k, top_p, generator):
    """The next token, (B, 1) int64, from logits (B, V): see GPT.generate."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    p = (wide(logits) / max(temperature, 1e-6)).softmax(-1)
    p, token = p.topk(min(top_k or p.shape[-1], p.shape[-1]))
    p[:, 1:][p.cumsum(-1)[:, :-1] >= (top_p or 2) * p.sum(-1, keepdim=True)] = 0  # the likelier ones reach top_p
    return token.gather(-1, torch.multinomial(p, 1, generator=generator))

KERNELS = dict(  # SDPA's backends; never its math path, which is slow in silence and makes the whole map
    sdpa=[SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], cudnn=[SDPBackend.CUDNN_ATTENTION],
    efficient=[SDPBackend.EFFICIENT_ATTENTION], flash_attn=None)

def sdpa(q, k, v, rate, kernel):
    """softmax(q k^T / sqrt(d) + log D) v, (B, H, T, d_v), without holding the map. q and k are (B, H, T, d); each head
    of v, (B, h, T, d_v), serves H/h neighbours of theirs. rate: (H, 1, 1), or None without decay."""
    T, d, d_v = *q.shape[2:], v.shape[-1]
    kernel = "sdpa" if T == 1 and kernel == "cudnn" else kernel  # cudnn refuses a single key
    if kernel != "cudnn":  # which takes fewer heads of v, and d_v = 2d
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    if kernel == "flash_attn":  # (B, T, H, d), and d_v = d only, so V goes in two halves: the paper's FlashDiffAttn_2
        from flash_attn import flash_attn_func
        how = dict(softmax_scale=d**-0.5, causal=True, alibi_slopes=None if rate is None else rate.flatten().float())
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.cat([flash_attn_func(q, k, part, **how) for part in v.split(d, -1)], -1).transpose(1, 2)
    if kernel == "sdpa":  # flash kernels want d_v = d, and a CPU's is 2 to 5 times slower without it
        q, k = F.pad(q, (0, d_v - d)), F.pad(k, (0, d_v - d))
    mask = None if rate is None else log_mask(rate, T).to(q.dtype)[None]  # (1, H, T, T)
    how = dict(attn_mask=mask, is_causal=mask is None, scale=d**-0.5, enable_gqa=v.shape[1] < q.shape[1])
    with sdpa_kernel(KERNELS[kernel]):
        return F.scaled_dot_product_attention(q, k, v, **how)

def pick_kernel(model, name="auto", dtype=torch.float32):
    """Puts one of KERNELS behind the softmax arms' fast form; "auto": of PyTorch's own the fastest that gives what the
    map gives for random q, k, v of this dtype, gradients too. Returns its name and why a faster one can't be had; None
    and "" for a model that uses none. ValueError with the reason when a kernel asked for by name can't be had."""
    layers, device, whys = [block.attn for block in model.blocks], model.wte.weight.device, []
    layer, cuda = layers[0], device.type == "cuda"
    if not isinstance(layer, Softmax) or not layer.flash:
        if name != "auto":
            raise ValueError(f"kernel {name} would not be used: only the softmax arms have kernels, in their fast form")
        return None, ""
    names = ["efficient", "sdpa"] if cuda and dtype == torch.float32 else ["sdpa", "efficient"]
    if cuda and torch.backends.cudnn.version() > 91500:  # before, wrong results were reported if 128 does not divide T
        names = ["cudnn", *names]
    how = dict(generator=torch.Generator(device).manual_seed(0), device=device, dtype=dtype, requires_grad=True)
    q, k = torch.randn(2, 1, layer.n_head, 130, layer.d, **how)
    v = torch.randn(1, layer.h, 130, model.config.n_embd // layer.h, **how)
    R, V = layer.rotation(v[:, 0]), v.repeat_interleave(layer.branches, 1)
    for kernel in names if name == "auto" else [name]:
        for layer in layers:
            layer.kernel = kernel
        try:
            both = Softmax.fast(layer, q, k, v, R), Softmax.A(layer, q, k, R).to(dtype) @ V
            gradients = [torch.autograd.grad(wide(y).square().sum(), (q, k, v)) for y in both]
            if all((wide(a) - wide(b)).norm() < 0.05 * wide(b).norm() for a, b in [both, *zip(*gradients)]):
                return kernel, "; ".join(whys)
            whys.append(f"kernel {kernel} can't be used: its result differs from the map's")
        except (RuntimeError, ImportError) as e:
            whys.append(f"kernel {kernel} can't run on {device}: {str(e).splitlines()[0]}")
    raise ValueError("; ".join(whys))

if __name__ == "__main__":  # the largest difference between each arm's forms, float64, and the first head's map
    for attn in ATTENTION:
        layer = GPT(GPTConfig(attn, n_layer=1, n_head=4, n_embd=64)).double().blocks[0].attn
        x, state = torch.randn(1, 200, 64).double() * 20, {}  # so large since weights of N(0, 0.02) make flat maps
        R = layer.rotation(x)
        fast, step = layer(x), [layer.prefill(x[:, :1], R[:1], state)]
        step += [layer.step(x[:, t : t + 1], R[t : t + 1], state) for t in range(1, 200)]
        layer.flash = False
        by_map, step = ((fast - y).abs().max() for y in (layer(x), torch.cat(step, 1)))
        print(f"\n{attn}: fast - map {by_map:.0e}, fast - step {step:.0e}, and the first head's map of four tokens:")
        for row in layer.map(x[:, :4])[0, 0]:
            print("".join(f"{a:7.2f}" for a in row), f"   sum {row.sum():.2f}")
