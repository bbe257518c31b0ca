"""
Mistakes as code: each function stands in place of the step of port/paper.py that its heading names.

What the docstring says is what a verdict says. port/mistakes.py lists them with their names.
"""
import math

import torch
import torch.nn.functional as F

from port.paper import is_later, turn

# ---- split: y.unflatten(-1, (n, maps, -1)).permute(0, 2, 3, 1, 4)

def split_without_transpose(y, n, maps):
    """Heads are view(B, T, h, c).transpose(1, 2). view(B, h, T, c) mixes tokens, and leaks."""
    B, T, _ = y.shape
    return y.reshape(B, n, T, maps, -1).transpose(2, 3)


def split_maps_without_transpose(y, n, maps):
    """Heads are view(B, T, 2h, c).transpose(1, 2). view(B, 2h, T, c) mixes tokens, and leaks."""
    B, T, _ = y.shape
    return y.reshape(B, n * maps, T, -1).unflatten(1, (n, maps))


def maps_read_as_tokens(y, n, maps):
    """(B, 2h, T, d) is read as (B, h, T, 2, d). It is (B, h, 2, T, d): else tokens are mixed, and
    it leaks."""
    B, T, _ = y.shape
    m = y.unflatten(-1, (n * maps, -1)).transpose(1, 2)  # (B, 2h, T, d)
    return m.reshape(B, n, T, maps, -1).transpose(2, 3)


def maps_in_blocks(y, n, maps):
    """First all first maps, then all second ones. In the paper's code the maps of a head are
    neighbours."""
    return y.unflatten(-1, (maps, n, -1)).permute(0, 3, 2, 1, 4)


# ---- values: step.split(y, w.kv, 1)

def values_in_halves(y, w, step):
    """First the first halves of all heads' values, then the second ones."""
    halves = y.unflatten(-1, (2, w.kv, -1)).transpose(-3, -2)
    return step.split(halves.flatten(-3), w.kv, 1)


# ---- group_keys, group_values: m.repeat_interleave(times, dim=1)

def tile(m, times):
    """Query heads n, n + kv, ... share a key, and not neighbours."""
    return m.repeat(1, times, 1, 1, 1)


def repeat_before_split(k, times):
    """Grouped keys are split into maps, then repeated. Microsoft's naive file repeats first; its
    flash file is the paper's."""
    return k.flatten(1, 2).repeat_interleave(times, dim=1).unflatten(1, (-1, 2))


def tile_over_maps(m, times):
    """The two maps of a head share a value: repeat_interleave(2, dim=1). repeat(1, 2, 1, 1) gives
    them those of two heads."""
    m = m.repeat_interleave(times, dim=1)  # (B, h, 1, T, c)
    return m.repeat(1, 2, 1, 1, 1).flatten(1, 2).unflatten(1, (-1, 2))


def pair_by_chunks(m, times):
    """Queries 2n and 2n + 1 are a pair: they use the same key and value."""
    m = m.flatten(1, 2).repeat_interleave(2 * times, dim=1)  # (B, 2h, T, c)
    return m.unflatten(1, (2, -1)).transpose(1, 2)


# ---- turn: neighbouring channels

def no_turn(m, theta):
    """Positions must come from elsewhere."""
    return m


def turn_by_halves(m, theta):
    """Channel i turns with i + d/2, and not with its neighbour."""
    return turn(m.unflatten(-1, (2, -1)).mT.flatten(-2), theta)


def turn_backwards(m, theta):
    """The angle has the other sign."""
    return turn(m.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), theta)


def turn_backwards_by_halves(m, theta):
    """The angle has the other sign, and channel i turns with i + d/2."""
    return turn(m.unflatten(-1, (2, -1)).flip(-2).mT.flatten(-2), theta)


def turn_both_maps(m, theta):
    """Each map's queries and keys turn by themselves: split, then rotate."""
    both = m.transpose(2, 3).flatten(3)  # (B, h, T, 2d)
    return turn(both, theta).unflatten(-1, (2, -1)).transpose(2, 3)


def turn_both_maps_by_halves(m, theta):
    """Each map's queries and keys turn by themselves, here by halves: split, then rotate."""
    both = m.permute(0, 1, 3, 4, 2).flatten(3)  # the same channels of the two maps side by side
    return turn(both, theta).unflatten(-1, (-1, 2)).permute(0, 1, 4, 2, 3)


# ---- scores: q @ k.mT / w.scale

def scores_of_normed(q, k, w):
    """The paper does not normalise q and k, which bounds the scores."""
    return F.rms_norm(q, q.shape[-1:]) @ F.rms_norm(k, k.shape[-1:]).mT / w.scale


# ---- maps: scores.masked_fill(is_later(scores), -math.inf).softmax(-1)

def no_mask(scores):
    """The scores of later tokens are -inf before the softmax. It leaks."""
    return scores.softmax(-1)


def mask_inverted(scores):
    """The mask hides the past, and not the future. It leaks."""
    is_hidden = torch.ones_like(scores[0, 0, 0], dtype=torch.bool).tril()
    return scores.masked_fill(is_hidden, -math.inf).softmax(-1).nan_to_num()


def mask_after_softmax(scores):
    """The mask comes before the softmax, and not after it, or after the subtraction. Else the
    divisor of each row leaks."""
    return scores.softmax(-1).tril()


def mask_off_by_one(scores):
    """The mask starts one token too late. It leaks."""
    is_hidden = torch.ones_like(scores[0, 0, 0], dtype=torch.bool).triu(2)
    return scores.masked_fill(is_hidden, -math.inf).softmax(-1)


def mask_off_by_one_multiplied(scores):
    """The mask starts one token too late, and is multiplied: exp(0) = 1. It leaks."""
    return scores.tril(1).softmax(-1)


def mask_multiplied(scores):
    """A masked score is -inf, and not 0: exp(0) = 1. It leaks."""
    return scores.tril().softmax(-1)


def mask_of_booleans_added(scores):
    """A boolean mask is added, so the future gets +1, and not -inf. Use masked_fill. It leaks."""
    return (scores + is_later(scores)).softmax(-1)


def mask_of_booleans_added_to_the_past(scores):
    """A boolean mask is added, so the past gets +1, and the future is not hidden. It leaks."""
    return (scores + ~is_later(scores)).softmax(-1)


def mask_on_first_map(scores):
    """Both maps need the mask. Only the first has it here. It leaks."""
    masked = scores.masked_fill(is_later(scores), -math.inf)
    return torch.stack((masked[:, :, 0], scores[:, :, 1]), dim=2).softmax(-1)


def mask_on_second_map(scores):
    """Both maps need the mask. Only the second has it here. It leaks."""
    masked = scores.masked_fill(is_later(scores), -math.inf)
    return torch.stack((scores[:, :, 0], masked[:, :, 1]), dim=2).softmax(-1)


# ---- subtract: y = A @ v, then y[:, :, 0] - lam * y[:, :, 1]

def softmax_twice(A, scores, v, lam):
    """The difference is the map. Another softmax leaves no negative weight, and without a mask it
    leaks."""
    return (A[:, :, 0] - lam * A[:, :, 1]).softmax(-1) @ v[:, :, 0]


def softmax_twice_with_masks(A, scores, v, lam):
    """The difference is the map. Another softmax, with a mask again, leaves no negative weight."""
    A = (A[:, :, 0] - lam * A[:, :, 1]).masked_fill(is_later(scores), -math.inf)
    return A.softmax(-1) @ v[:, :, 0]


def mask_between_two_softmaxes(A, scores, v, lam):
    """The first softmax has no mask, so it leaks. The mask comes after the subtraction, and then
    another softmax."""
    A = scores.softmax(-1)
    A = (A[:, :, 0] - lam * A[:, :, 1]).masked_fill(is_later(scores), -math.inf)
    return A.softmax(-1) @ v[:, :, 0]


def one_softmax(A, scores, v, lam):
    """Each map has its own softmax: maps are subtracted, not scores."""
    difference = scores[:, :, 0] - lam * scores[:, :, 1]
    return difference.masked_fill(is_later(scores), -math.inf).softmax(-1) @ v[:, :, 0]


def one_softmax_without_mask(A, scores, v, lam):
    """Each map has its own softmax: maps are subtracted, not scores. There is no mask, so it leaks,
    too."""
    return (scores[:, :, 0] - lam * scores[:, :, 1]).softmax(-1) @ v[:, :, 0]


def negative_weights_cut(A, scores, v, lam):
    """The difference has negative weights, and they stay."""
    return (A[:, :, 0] - lam * A[:, :, 1]).clamp(min=0) @ v[:, :, 0]


def outputs_read_as_tokens(A, scores, v, lam):
    """A V of both maps, (B, 2h, T, c), is read as (B, h, T, 2, c). It is (B, h, 2, T, c): else
    tokens are mixed, and it leaks."""
    y = A @ v  # (B, h, 2, T, c)
    y = y.flatten(2, 3).unflatten(2, (-1, 2))  # (B, h, T, 2, c)
    return y[:, :, :, 0] - lam * y[:, :, :, 1]


# ---- lam, in version 2: torch.sigmoid(x @ w.gate.T)

def lam_without_sigmoid(x, w):
    """In version 2 lambda is sigmoid(x W), so it lies between 0 and 1."""
    return (x @ w.gate.T).mT[..., None]


# ---- rms: y * torch.rsqrt(y.square().mean(dims) + eps). gain: weight

def layer_norm(y, dims):
    """An RMSNorm does not subtract the mean. LayerNorm and GroupNorm do."""
    y = y - y.mean(dims, keepdim=True)
    return y * torch.rsqrt(y.square().mean(dims, keepdim=True) + 1e-5)


def no_gain(weight):
    """The norm has no weight."""
    return torch.ones_like(weight)


def gain_from_zero(weight):
    """The norm's weight is 1 + w: it starts at 0 in place of 1."""
    return 1 + weight


# ---- norm: step.rms(y, -1) * step.gain(w.norm), where y is (B, h, T, d_v)

def no_norm(y, w, step):
    """Each head's output has an RMSNorm over its 2d channels."""
    return y


def norm_over_heads(y, w, step):
    """The norm is over the channels of one token and one head, and not over all heads."""
    return step.rms(y, (1, 3)) * step.gain(w.norm)


def norm_over_time(y, w, step):
    """The norm is over the channels of one token and one head. The paper calls it GroupNorm;
    nn.GroupNorm on (B, C, T) pools over time, and sees the future."""
    return step.rms(y, (2, 3)) * step.gain(w.norm)


def norm_over_time_and_heads(y, w, step):
    """The norm is over the channels of one token and one head. nn.GroupNorm(1, C) on (B, C, T)
    pools over all, and sees the future."""
    return step.rms(y, (1, 2, 3)) * step.gain(w.norm)


def norm_over_time_by_channel(y, w, step):
    """The norm is over the channels of one token and one head, and not over the tokens of one
    channel. It leaks."""
    return step.rms(y, 2) * step.gain(w.norm)


def norm_in_version_2(y, w, step):
    """Version 2 has no norm behind its heads."""
    return step.rms(y, -1) * step.gain(w.norm)


# ---- merge: y.transpose(1, 2).flatten(2). output: merge(norm(y)) @ w.o.T

def merge_without_transpose(y):
    """transpose(1, 2) comes before the reshape. Else tokens mix, and it leaks."""
    B, _, T, _ = y.shape
    return y.reshape(B, T, -1)


def merge_channels_first(y):
    """Tokens come before channels when heads are merged. Else they mix, and it leaks."""
    B, _, T, _ = y.shape
    return y.permute(0, 3, 1, 2).reshape(B, T, -1)


def merge_alternating(y):
    """In the merged output the heads' channels alternate."""
    return y.permute(0, 2, 3, 1).flatten(2)


def norm_after_out_proj(y, w, step):
    """The norm is over the channels of one token and one head, so it comes before out_proj."""
    return step.rms(step.merge(y) @ w.o.T, -1) * step.gain(w.output_norm)
