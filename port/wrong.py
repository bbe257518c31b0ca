"""
Mistakes as code: each function stands in place of the step of port/paper.py that its heading names.

A verdict says what the docstring says: what the port does, then what the paper does. *It leaks*
means: tokens see the future. port/mistakes.py lists the mistakes with their names.
"""
import math

import torch
import torch.nn.functional as F

from model import NORM_EPS
from port.paper import is_later, rms, rotary, turn

# ---- split: y.unflatten(-1, (n, maps, -1)).permute(0, 2, 3, 1, 4)

def split_without_transpose(y, n, maps):
    """Heads are view(B, h, T, c), which mixes tokens, so it leaks. In the paper's code they are
    view(B, T, h, c).transpose(1, 2)."""
    B, T, _ = y.shape
    return y.reshape(B, n, T, maps, -1).transpose(2, 3)


def split_maps_without_transpose(y, n, maps):
    """Maps are view(B, 2h, T, c), which mixes tokens, so it leaks. In the paper's code they are
    view(B, T, 2h, c).transpose(1, 2)."""
    B, T, _ = y.shape
    return y.reshape(B, n * maps, T, -1).unflatten(1, (n, maps))


def maps_read_as_tokens(y, n, maps):
    """(B, 2h, T, d) is read as (B, h, T, 2, d), which mixes tokens, so it leaks. In the paper's
    code it is (B, h, 2, T, d)."""
    B, T, _ = y.shape
    m = y.unflatten(-1, (n * maps, -1)).transpose(1, 2)  # (B, 2h, T, d)
    return m.reshape(B, n, T, maps, -1).transpose(2, 3)


def maps_in_blocks(y, n, maps):
    """All first maps come first, then all second ones. In the paper's code the maps of a head are
    neighbours."""
    return y.unflatten(-1, (maps, n, -1)).permute(0, 3, 2, 1, 4)


# ---- values: step.split(y, w.kv, 1)

def values_in_halves(y, w, step):
    """The first halves of all heads' values come first, then the second ones. In the paper's code
    the halves of a head are neighbours."""
    halves = y.unflatten(-1, (2, w.kv, -1)).transpose(-3, -2)
    return step.split(halves.flatten(-3), w.kv, 1)


# ---- group_keys, group_values: m.repeat_interleave(times, dim=1)

def tile(m, times):
    """Query heads n, n + kv, ... share a key. In the paper's code neighbours share it."""
    return m.repeat(1, times, 1, 1, 1)


def repeat_before_split(k, times):
    """Grouped keys are repeated, then split into maps, as in Microsoft's naive file. In the paper
    they are split, then repeated, as in Microsoft's flash files."""
    return k.flatten(1, 2).repeat_interleave(times, dim=1).unflatten(1, (-1, 2))


def tile_over_maps(m, times):
    """repeat(1, 2, 1, 1) gives the two maps of a head what belongs to two heads. In the paper they
    share it: repeat_interleave(2, dim=1)."""
    m = m.repeat_interleave(times, dim=1)  # (B, h, 1, T, c)
    return m.repeat(1, 2, 1, 1, 1).flatten(1, 2).unflatten(1, (-1, 2))


def pair_by_chunks(m, times):
    """Queries n and n + h are a pair. In version 2 queries 2n and 2n + 1 are a pair: they share a
    key and a value."""
    m = m.flatten(1, 2).repeat_interleave(2 * times, dim=1)  # (B, 2h, T, c)
    return m.unflatten(1, (2, -1)).transpose(1, 2)


# ---- turn: neighbouring channels

def no_turn(m, theta):
    """Nothing turns, so positions must come from elsewhere. In the paper queries and keys have a
    rotary embedding."""
    return m


def turn_by_halves(m, theta):
    """Channel i turns with i + d/2. In the paper's code it turns with its neighbour."""
    return turn(m.unflatten(-1, (2, -1)).mT.flatten(-2), theta)


def turn_backwards(m, theta):
    """Channels turn by the negative angle. In the paper's code they turn by the positive one."""
    return turn(m.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), theta)


def turn_backwards_by_halves(m, theta):
    """Channel i turns with i + d/2, by the negative angle. In the paper's code it turns with its
    neighbour, by the positive one."""
    return turn(m.unflatten(-1, (2, -1)).flip(-2).mT.flatten(-2), theta)


def turn_both_maps(m, theta):
    """Both maps turn as one vector of 2d channels. In the paper each map's queries and keys turn by
    themselves: split, then rotate."""
    both = m.transpose(2, 3).flatten(3)  # (B, h, T, 2d)
    return turn(both, theta).unflatten(-1, (2, -1)).transpose(2, 3)


def turn_both_maps_by_halves(m, theta):
    """Both maps turn as one vector of 2d channels, by halves. In the paper each map's queries and
    keys turn by themselves: split, then rotate."""
    both = m.permute(0, 1, 3, 4, 2).flatten(3)  # the same channels of the two maps side by side
    return turn(both, theta).unflatten(-1, (-1, 2)).permute(0, 1, 4, 2, 3)


def turn_first_map(m, theta):
    """Only the first map turns. In the paper both maps turn."""
    return torch.stack((turn(m[:, :, 0], theta), m[:, :, 1]), dim=2)


def turn_first_map_by_halves(m, theta):
    """Only the first map turns, by halves. In the paper both maps turn."""
    return torch.stack((turn_by_halves(m[:, :, 0], theta), m[:, :, 1]), dim=2)


# ---- queries: rotary(q, w, step)

def queries_one_ahead(q, w, step):
    """Queries turn by one position more than keys do. In the paper both have the same position, so
    the score of a token with itself does not turn."""
    return rotary(F.pad(q, (0, 0, 1, 0)), w, step)[..., 1:, :]


# ---- scores: q @ k.mT / w.scale

def scores_of_normed(q, k, w):
    """Queries and keys are normed, which bounds the scores. In the paper they are not."""
    return F.rms_norm(q, q.shape[-1:]) @ F.rms_norm(k, k.shape[-1:]).mT / w.scale


# ---- maps: scores.masked_fill(is_later(scores), -math.inf).softmax(-1)

def no_mask(scores):
    """Later tokens are seen, so it leaks. In the paper their scores are -inf before the softmax."""
    return scores.softmax(-1)


def mask_inverted(scores):
    """The mask hides the past, and not the future, so it leaks. In the paper it hides the
    future."""
    is_hidden = torch.ones_like(scores[0, 0, 0], dtype=torch.bool).tril()
    return scores.masked_fill(is_hidden, -math.inf).softmax(-1).nan_to_num()


def mask_after_softmax(scores):
    """The mask comes after the softmax, or after the subtraction, so the divisor of each row leaks.
    In the paper it comes before the softmax."""
    return scores.softmax(-1).tril()


def mask_off_by_one(scores):
    """The mask starts one token too late, so it leaks. In the paper the next token is hidden,
    too."""
    is_hidden = torch.ones_like(scores[0, 0, 0], dtype=torch.bool).triu(2)
    return scores.masked_fill(is_hidden, -math.inf).softmax(-1)


def mask_off_by_one_multiplied(scores):
    """The mask starts one token too late, and is multiplied: exp(0) = 1, so it leaks. In the paper
    the scores of all later tokens are -inf."""
    return scores.tril(1).softmax(-1)


def mask_multiplied(scores):
    """The scores of later tokens are 0: exp(0) = 1, so it leaks. In the paper they are -inf."""
    return scores.tril().softmax(-1)


def mask_of_booleans_added(scores):
    """A boolean mask is added, so the future gets +1, and it leaks. In the paper its scores are
    -inf. Use masked_fill."""
    return (scores + is_later(scores)).softmax(-1)


def mask_of_booleans_added_to_the_past(scores):
    """A boolean mask is added, so the past gets +1, and the future is not hidden: it leaks. In the
    paper the future's scores are -inf. Use masked_fill."""
    return (scores + ~is_later(scores)).softmax(-1)


def mask_on_first_map(scores):
    """Only the first map has the mask, so it leaks. In the paper both maps have it."""
    masked = scores.masked_fill(is_later(scores), -math.inf)
    return torch.stack((masked[:, :, 0], scores[:, :, 1]), dim=2).softmax(-1)


def mask_on_second_map(scores):
    """Only the second map has the mask, so it leaks. In the paper both maps have it."""
    masked = scores.masked_fill(is_later(scores), -math.inf)
    return torch.stack((scores[:, :, 0], masked[:, :, 1]), dim=2).softmax(-1)


# ---- subtract: y = A @ v, then y[:, :, 0] - lam * y[:, :, 1]

def softmax_twice(A, scores, v, lam):
    """The difference goes through another softmax, which leaves no negative weight, and without a
    mask leaks. In the paper the difference is the map."""
    return (A[:, :, 0] - lam * A[:, :, 1]).softmax(-1) @ v[:, :, 0]


def softmax_twice_with_masks(A, scores, v, lam):
    """The difference goes through another softmax, with a mask again, which leaves no negative
    weight. In the paper the difference is the map."""
    A = (A[:, :, 0] - lam * A[:, :, 1]).masked_fill(is_later(scores), -math.inf)
    return A.softmax(-1) @ v[:, :, 0]


def mask_between_two_softmaxes(A, scores, v, lam):
    """The first softmax has no mask, so it leaks. The mask comes after the subtraction, and then
    another softmax. In the paper both maps have the mask, and their difference is the map."""
    A = scores.softmax(-1)
    A = (A[:, :, 0] - lam * A[:, :, 1]).masked_fill(is_later(scores), -math.inf)
    return A.softmax(-1) @ v[:, :, 0]


def one_softmax(A, scores, v, lam):
    """Scores are subtracted, and one softmax follows. In the paper each map has its own softmax,
    and maps are subtracted."""
    difference = scores[:, :, 0] - lam * scores[:, :, 1]
    return difference.masked_fill(is_later(scores), -math.inf).softmax(-1) @ v[:, :, 0]


def one_softmax_without_mask(A, scores, v, lam):
    """Scores are subtracted, and one softmax follows, without a mask, so it leaks. In the paper
    each map has its own mask and softmax, and maps are subtracted."""
    return (scores[:, :, 0] - lam * scores[:, :, 1]).softmax(-1) @ v[:, :, 0]


def negative_weights_cut(A, scores, v, lam):
    """Negative weights of the difference become 0. In the paper they stay."""
    return (A[:, :, 0] - lam * A[:, :, 1]).clamp(min=0) @ v[:, :, 0]


def outputs_read_as_tokens(A, scores, v, lam):
    """A V of both maps, (B, 2h, T, c), is read as (B, h, T, 2, c), which mixes tokens, so it leaks.
    In the paper's code it is (B, h, 2, T, c)."""
    y = A @ v  # (B, h, 2, T, c)
    y = y.flatten(2, 3).unflatten(2, (-1, 2))  # (B, h, T, 2, c)
    return y[:, :, :, 0] - lam * y[:, :, :, 1]


def norm_before_subtraction(A, scores, v, lam):
    """The output of each map is normed, and then they are subtracted. In the paper the difference
    is normed."""
    y = rms(A @ v, -1)
    return y[:, :, 0] - lam * y[:, :, 1]


# ---- lam, in version 2: torch.sigmoid(x @ w.gate.T)

def lam_without_sigmoid(x, w):
    """lambda is x W, which has no bounds. In version 2 it is sigmoid(x W), between 0 and 1."""
    return (x @ w.gate.T).mT[..., None]


# ---- rms: y * torch.rsqrt(y.square().mean(dims) + eps). gain: weight

def layer_norm(y, dims):
    """The norm subtracts the mean, as LayerNorm and GroupNorm do. In the paper it is an RMSNorm,
    which does not."""
    y = y - y.mean(dims, keepdim=True)
    return y * torch.rsqrt(y.square().mean(dims, keepdim=True) + NORM_EPS)


def no_gain(weight):
    """The norm has no weight. In the paper it has one, for all heads."""
    return torch.ones_like(weight)


def gain_from_zero(weight):
    """The norm's weight is 1 + w, and w starts at 0. In the paper's code it is w, which starts at
    1."""
    return 1 + weight


# ---- norm: step.rms(y, -1) * step.gain(w.norm), where y is (B, h, T, d_v)

def no_norm(y, w, step):
    """The heads' outputs have no norm. In the paper each has an RMSNorm over its 2d channels."""
    return y


def gain_alone(y, w, step):
    """The norm's weight, where the norm itself came before. In the paper they are together."""
    return y * step.gain(w.norm)


def norm_over_heads(y, w, step):
    """The norm is over all heads of a token. In the paper it is over the channels of one token and
    one head."""
    return step.rms(y, (1, 3)) * step.gain(w.norm)


def norm_over_time(y, w, step):
    """The norm pools over time, as nn.GroupNorm on (B, C, T) does, so it leaks. In the paper it is
    called GroupNorm, and is over the channels of one token and one head."""
    return step.rms(y, (2, 3)) * step.gain(w.norm)


def norm_over_time_and_heads(y, w, step):
    """The norm pools over time and heads, as nn.GroupNorm(1, C) on (B, C, T) does, so it leaks. In
    the paper it is over the channels of one token and one head."""
    return step.rms(y, (1, 2, 3)) * step.gain(w.norm)


def norm_over_time_by_channel(y, w, step):
    """The norm is over the tokens of one channel, so it leaks. In the paper it is over the channels
    of one token and one head."""
    return step.rms(y, 2) * step.gain(w.norm)


def norm_in_version_2(y, w, step):
    """The heads' outputs have a norm. In version 2 they have none."""
    return step.rms(y, -1) * step.gain(w.norm)


# ---- merge: y.transpose(1, 2).flatten(2). output: merge(norm(y)) @ w.o.T

def merge_without_transpose(y):
    """Heads are merged by a reshape alone, which mixes tokens, so it leaks. In the paper's code
    transpose(1, 2) comes before it."""
    B, _, T, _ = y.shape
    return y.reshape(B, T, -1)


def merge_channels_first(y):
    """Channels come before tokens when heads are merged, which mixes tokens, so it leaks. In the
    paper's code tokens come first."""
    B, _, T, _ = y.shape
    return y.permute(0, 3, 1, 2).reshape(B, T, -1)


def merge_alternating(y):
    """In the merged output the heads' channels alternate. In the paper's code those of one head are
    neighbours."""
    return y.permute(0, 2, 3, 1).flatten(2)


def norm_after_out_proj(y, w, step):
    """The norm comes after out_proj. In the paper it comes before, over the channels of one token
    and one head."""
    return step.rms(step.merge(y) @ w.o.T, -1) * step.gain(w.output_norm)
