"""
What ports have in place of the paper's steps: the list, which is also the page to read.

Each function stands in place of the step of paper.py that its decorator names. A verdict prints its
docstring, which says what the port does, and then what the paper does.

    BROKEN    sees the future, gives NaN, does not learn, ...
    DIFFERS   computes something else than the paper. *It leaks*: tokens see the future
    CHOICE    the paper's layer, but for something that one may choose
    SAME      the paper's layer, with its weights in another usual order
    UNCLEAR   may be wrong: with it nothing is called SAME or CHOICE
    NOTE      is said beside the verdict
"""
import inspect
import math
import textwrap
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from model import NORM_EPS
from port import paper

KINDS = BROKEN, DIFFERS, CHOICE, SAME, UNCLEAR, NOTE = (
    "BROKEN", "DIFFERS", "CHOICE", "SAME", "UNCLEAR", "NOTE")


@dataclass(frozen=True, eq=False)
class Mistake:
    name: str
    kind: str
    text: str
    step: str = ""  # of the paper, in whose place stands
    yours: object = None
    leaks: bool = False  # tokens see the future
    sharp: bool = False  # it does not show where all maps are flat
    by_lambda: bool = False  # how much it shows where maps are flat depends on lambda
    version: int = 0  # the only one that can have it
    grouped: bool = False  # it shows only where heads share keys

    def code(self):
        """The paper's step and this one, as text."""
        papers = getattr(paper.steps_of(self.version or 1, causal=True), self.step)
        return (f"the paper:\n{body(self.step, papers)}\n"
                f"yours is like:\n{body(self.step, self.yours)}")


def body(step, what):
    """The lines of a function below its head and its docstring, or what else stands there."""
    if not callable(what):
        return f"    {step} = {what}"
    lines = inspect.getsource(what).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("def")) + 1
    start += len((what.__doc__ or "").splitlines())
    return textwrap.indent(textwrap.dedent("\n".join(lines[start:])), "    ")


BY_TRYING = []  # what is found by trying


def instead_of(step, name, kind=DIFFERS, **flags):
    """A decorator that lists a function as a mistake."""
    def add(function):
        text = " ".join(function.__doc__.split())
        BY_TRYING.append(Mistake(name, kind, text, step, function, **flags))
        return function
    return add


# ---- maps: softmax of the scores, those of later tokens being -inf

@instead_of("maps", "no mask", leaks=True)
def no_mask(scores):
    """Later tokens are seen, so it leaks. In the paper their scores are -inf before the softmax."""
    return scores.softmax(-1)


@instead_of("maps", "mask after softmax", leaks=True)
def mask_after_softmax(scores):
    """The mask comes after the softmax, or after the subtraction, so the divisor of each row leaks.
    In the paper it comes before the softmax."""
    return scores.softmax(-1).tril()


@instead_of("maps", "mask off by one", leaks=True)
def mask_off_by_one(scores):
    """The mask starts one token too late, so it leaks. In the paper the next token is hidden."""
    return scores.masked_fill(torch.ones_like(scores).triu(2) > 0, -math.inf).softmax(-1)


@instead_of("maps", "mask multiplied", leaks=True)
def mask_multiplied(scores):
    """The scores of later tokens are 0: exp(0) = 1, so it leaks. In the paper they are -inf."""
    return scores.tril().softmax(-1)


@instead_of("maps", "mask off by one", leaks=True)
def mask_off_by_one_multiplied(scores):
    """The mask starts one token too late, and the scores that it hides are 0: exp(0) = 1, so it
    leaks. In the paper all later tokens are hidden, and their scores are -inf."""
    return scores.tril(1).softmax(-1)


@instead_of("maps", "boolean mask added", leaks=True)
def boolean_mask_added(scores):
    """A boolean mask is added, so the future gets +1, and it leaks. In the paper its scores are
    -inf. Use masked_fill."""
    return (scores + paper.is_later(scores)).softmax(-1)


@instead_of("maps", "mask on one map", leaks=True, by_lambda=True)
def mask_on_first_map(scores):
    """Only the first map has the mask, so it leaks. In the paper both maps have it."""
    return torch.stack((paper.maps(scores)[:, :, 0], scores[:, :, 1].softmax(-1)), dim=2)


# ---- subtract: A V of the first map, less lambda times that of the second

@instead_of("subtract", "softmax twice", by_lambda=True)
def softmax_twice(A, scores, v, lam, s):
    """The difference goes through another softmax, which leaves no negative weight. In the paper
    the difference is the map."""
    return s.maps(A[:, :, 0] - lam * A[:, :, 1]) @ v[:, :, 0]


@instead_of("subtract", "mask between two softmaxes", leaks=True, by_lambda=True)
def mask_between_two_softmaxes(A, scores, v, lam, s):
    """The first softmax has no mask, so it leaks. The mask comes after the subtraction, and then
    another softmax. In the paper both maps have the mask, and their difference is the map."""
    return softmax_twice(scores.softmax(-1), scores, v, lam, s)


@instead_of("subtract", "one softmax")
def one_softmax(A, scores, v, lam, s):
    """Scores are subtracted, and one softmax follows. In the paper each map has its own softmax,
    and maps are subtracted."""
    return s.maps(scores[:, :, 0] - lam * scores[:, :, 1]) @ v[:, :, 0]


@instead_of("subtract", "maps swapped", SAME, sharp=True)
def maps_swapped(A, scores, v, lam, s):
    """The first of a head's maps is subtracted from the second one. In the paper's code the second
    is subtracted from the first."""
    return paper.subtract(A.flip(2), scores, v, lam, s)


# ---- lam. Version 1 fits a number. Version 2 has sigmoid(x W)

@instead_of("lam", "lambda", version=2)
def lam_without_sigmoid(x, w):
    """lambda is x W, which has no bounds. In version 2 it is sigmoid(x W), between 0 and 1."""
    return (x @ w.gate.T).mT[..., None]


# ---- split: y.unflatten(-1, (n, maps, -1)).permute(0, 2, 3, 1, 4)

@instead_of("split", "heads not transposed", leaks=True)
def heads_not_transposed(y, n, maps):
    """Heads are view(B, h, T, c), which mixes tokens, so it leaks. In the paper's code they are
    view(B, T, h, c).transpose(1, 2)."""
    return y.reshape(y.shape[0], n, y.shape[1], maps, -1).transpose(2, 3)


@instead_of("split", "maps read as tokens", leaks=True, sharp=True)
def maps_read_as_tokens(y, n, maps):
    """(B, 2h, T, d) is read as (B, h, T, 2, d), which mixes tokens, so it leaks. In the paper's
    code it is (B, h, 2, T, d)."""
    m = y.unflatten(-1, (n * maps, -1)).transpose(1, 2)  # (B, 2h, T, d)
    return m.reshape(y.shape[0], n, y.shape[1], maps, -1).transpose(2, 3)


@instead_of("split", "maps in blocks", SAME, sharp=True)
def maps_in_blocks(y, n, maps):
    """All first maps come first, then all second ones. In the paper's code the maps of a head are
    neighbours."""
    return y.unflatten(-1, (maps, n, -1)).permute(0, 3, 2, 1, 4)


@instead_of("values", "values in halves", SAME)
def values_in_halves(y, n, s):
    """The first halves of all heads' values come first, then the second ones. In the paper's code
    the halves of a head are neighbours."""
    return s.split(y.unflatten(-1, (2, n, -1)).transpose(-3, -2).flatten(-3), n, 1)


@instead_of("values", "values apart", version=1)
def values_apart(y, n, s):
    """Each map has values of its own. In the paper the two maps of a head share one value."""
    return s.split(y, n, 2)


# ---- share: keys and values, each for the heads that share it, by repeat_interleave

@instead_of("share", "groups tiled", SAME, grouped=True)
def groups_tiled(k, v, times):
    """Query heads n, n + kv, ... share a key. In the paper's code neighbours share it."""
    return k.repeat(1, times, 1, 1, 1), v.repeat(1, times, 1, 1, 1)


@instead_of("share", "repeated before split", sharp=True, grouped=True)
def repeated_before_split(k, v, times):
    """Grouped keys are repeated, then split into maps, as in Microsoft's naive file. In the paper
    they are split, then repeated, as in Microsoft's flash files."""
    k = k.flatten(1, 2).repeat_interleave(times, dim=1).unflatten(1, (-1, k.shape[2]))
    return k, v.repeat_interleave(times, dim=1)


@instead_of("share", "values tiled", by_lambda=True)
def values_tiled(k, v, times):
    """repeat(1, 2, 1, 1) gives the two maps of a head the values of two heads. In the paper they
    share them: repeat_interleave(2, dim=1)."""
    k, v = paper.share(k, v, times)
    return k, v.repeat(1, 2, 1, 1, 1).flatten(1, 2).unflatten(1, (-1, 2))


@instead_of("share", "V2 pairs by chunks", version=2)
def pairs_by_chunks(k, v, times):
    """Queries n and n + h are a pair. In version 2 queries 2n and 2n + 1 are a pair: they share a
    key and a value."""
    k, v = [m.flatten(1, 2).repeat_interleave(2 * times, dim=1) for m in (k, v)]
    return [m.unflatten(1, (2, -1)).transpose(1, 2) for m in (k, v)]


# ---- pairs, turn: neighbouring channels turn together, in each map by itself

@instead_of("pairs", "rotary by halves", SAME, sharp=True)
def by_halves(d):
    """Channel i turns with i + d/2. In the paper's code it turns with its neighbour."""
    return torch.arange(d).view(2, -1).T.flatten()


@instead_of("pairs", "rotary backwards", SAME, sharp=True)
def backwards(d):
    """Channels turn by the negative angle. In the paper's code they turn by the positive one."""
    return torch.arange(d).view(-1, 2).flip(1).flatten()


@instead_of("pairs", "rotary backwards", SAME, sharp=True)
def backwards_by_halves(d):
    """Channel i turns with i + d/2, by the negative angle. In the paper's code it turns with its
    neighbour, by the positive one."""
    return torch.arange(d).view(2, -1).flip(0).T.flatten()


@instead_of("turn", "no rotary", CHOICE, sharp=True)
def no_turn(m, theta, s):
    """Nothing turns, so positions must come from elsewhere. In the paper queries and keys have a
    rotary embedding."""
    return m


@instead_of("turn", "rotary over both maps", sharp=True, version=1)
def turn_both_maps(m, theta, s):
    """Both maps turn as one vector of 2d channels. In the paper each map's queries and keys turn by
    themselves: split, then rotate."""
    both = m.transpose(2, 3).flatten(3)  # (B, h, T, 2d)
    return paper.turn(both, theta, s).unflatten(-1, (2, -1)).transpose(2, 3)


@instead_of("turn", "rotary on one map", sharp=True, version=1)
def turn_first_map(m, theta, s):
    """Only the first map turns. In the paper both maps turn."""
    return torch.stack((paper.turn(m[:, :, 0], theta, s), m[:, :, 1]), dim=2)


@instead_of("scores", "qk-norm", sharp=True)
def scores_of_normed(q, k):
    """Queries and keys are normed, which bounds the scores. In the paper they are not."""
    return F.rms_norm(q, q.shape[-1:]) @ F.rms_norm(k, k.shape[-1:]).mT


# ---- the norm: y * rsqrt(mean of y^2 over s.over + eps) * weight, y being (B, h, T, d_v)

@instead_of("rms", "mean subtracted")
def mean_subtracted(y, dims):
    """The norm subtracts the mean, as LayerNorm and GroupNorm do. In the paper it is an RMSNorm,
    which does not."""
    y = y - y.mean(dims, keepdim=True)
    return y * torch.rsqrt(y.square().mean(dims, keepdim=True) + NORM_EPS)


@instead_of("gain", "no norm weight", CHOICE)
def no_gain(weight):
    """The norm has no weight. In the paper it has one, for all heads."""
    return torch.ones_like(weight)


@instead_of("gain", "norm weight 1 + w", SAME)
def gain_from_zero(weight):
    """The norm's weight is 1 + w, and w starts at 0. In the paper's code it is w, which starts at
    1."""
    return 1 + weight


ONE = "In the paper it is over the channels of one token and one head."
BY_TRYING += [
    Mistake("no norm", DIFFERS, "The heads' outputs have no norm. In the paper each has an RMSNorm "
            "over its 2d channels.", "over", (), version=1),
    Mistake("norm in version 2", DIFFERS, "The heads' outputs have a norm. In version 2 they have "
            "none.", "over", (-1,), version=2),
    Mistake("norm over all heads", DIFFERS, f"The norm is over all heads of a token. {ONE}",
            "over", (1, 3)),
] + [
    Mistake("norm over time", DIFFERS, "The norm pools over time, as nn.GroupNorm on (B, C, T) "
            f"does, so it leaks. {ONE}", "over", over, leaks=True)
    for over in ((2, 3), (1, 2, 3), (2,))
]


# ---- merge: y.transpose(1, 2).flatten(2). output: merge(norm(y)) @ W_O

@instead_of("merge", "merge not transposed", leaks=True)
def merge_without_transpose(y):
    """Heads are merged by a reshape alone, which mixes tokens, so it leaks. In the paper's code
    transpose(1, 2) comes before it."""
    return y.reshape(y.shape[0], y.shape[2], -1)


@instead_of("merge", "merge not transposed", leaks=True)
def merge_channels_first(y):
    """Channels come before tokens when heads are merged, which mixes tokens, so it leaks. In the
    paper's code tokens come first."""
    return y.permute(0, 3, 1, 2).reshape(y.shape[0], y.shape[2], -1)


@instead_of("merge", "heads alternate", SAME)
def merge_alternating(y):
    """In the merged output the heads' channels alternate. In the paper's code those of one head are
    neighbours."""
    return y.permute(0, 2, 3, 1).flatten(2)


@instead_of("output", "norm after out_proj")
def norm_after_out_proj(y, w, s):
    """The norm comes after out_proj. In the paper it comes before, over the channels of one token
    and one head."""
    return s.rms(s.merge(y) @ w.o.T, -1) * s.gain(w.output_norm)


# ---- what is seen from outside, and what is measured

SAID = {mistake.name: mistake for mistake in [
    Mistake("sees the future", BROKEN, "A token changes the outputs of earlier ones. Validation "
            "loss is too good, and generation bad."),
    Mistake("NaN", BROKEN, "Outputs are NaN. Usual: -inf is put in after the softmax."),
    Mistake("random", BROKEN, "In eval mode one input gives two outputs."),
    Mistake("dropout", BROKEN, "In eval mode a dropout is still at work. Usual: F.dropout(x) "
            "without training=self.training, or dropout_p in scaled_dot_product_attention."),
    Mistake("mixes samples", BROKEN, "Samples of a batch are mixed. Usual: (T, B, C) read as "
            "(B, T, C)."),
    Mistake("no past", BROKEN, "No token uses an earlier one. Usual: q @ k.mT before "
            "transpose(1, 2), so that heads attend to heads, or an inverted mask."),
    Mistake("dead weights", BROKEN, "Some weights, or some rows of them, have no effect."),
    Mistake("switch", BROKEN, "Two settings of one layer, or train() without its dropouts and "
            "eval(), differ."),
    Mistake("unclear as it trains", UNCLEAR, "What it computes in train() can't be compared with "
            "eval(). Turn off what is in the way."),
    Mistake("writes into x", NOTE, "Its input is changed in place, so a residual is another one."),
    Mistake("unused norm", NOTE, "The weight of a norm is built and never used."),
    Mistake("start from zeros", NOTE, "Two of lambda's vectors that are multiplied start at 0. "
            "Each is the other one's gradient, so they stay there."),
    Mistake("rounding", NOTE, "The layer rounds to float16 or bfloat16 inside. What differs by "
            "less is not seen."),
    Mistake("overflow", BROKEN, "Its own weights with inputs 30 times as large as behind a norm "
            "give NaN or infinity: float16 ends at 65504."),
    Mistake("large scores", NOTE, "Inputs 30 times as large as behind a norm give NaN or infinity. "
            "Usual: exp(scores) without their maximum taken off, where softmax takes it off."),
    Mistake("scale", DIFFERS, "Scores are divided by another number. In the paper it is sqrt(d)."),
    Mistake("lambda", DIFFERS, "lambda has another form. In the paper it is exp(lambda_q1 . "
            "lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init."),
    Mistake("lambda negative", DIFFERS, "The second map is added, not subtracted: lambda is "
            "negative. In the paper lambda A_2 is subtracted."),
    Mistake("lambda bounded", DIFFERS, "lambda is kept above or below a number. In the paper it "
            "has no bounds."),
    Mistake("rows sum to 1", DIFFERS, "Rows of A_1 - lambda A_2 are divided by their sum: where "
            "lambda is above 1 outputs change their sign. In the paper rows sum to 1 - lambda."),
    Mistake("lambda_init", DIFFERS, "lambda_init is that of another layer, or not between 0 and 1. "
            "In the paper it is 0.8 - 0.6 exp(-0.3 l), and l counts the layers from 0."),
    Mistake("constant lambda_init", CHOICE, "lambda_init is that of no layer. In the paper it is "
            "0.8 - 0.6 exp(-0.3 l); a constant may be meant, and the paper tries one."),
    Mistake("factor", DIFFERS, "The normed output is multiplied by another number. In the paper it "
            "is 1 - lambda_init."),
    Mistake("value width", CHOICE, "A value has another width. In the paper it has 2d channels, "
            "and in version 2 d."),
    Mistake("rotary base", CHOICE, "The rotary embedding has another theta than 10000."),
    Mistake("rotary table", DIFFERS, "The rotary embedding turns as if theta were 100, the root of "
            "10000. Usual: the table was made for 2d channels."),
    Mistake("rotary share", CHOICE, "The rotary embedding turns some channels of a query. In the "
            "paper it turns all."),
    Mistake("length", DIFFERS, "In a text of another length the layer computes something else, as "
            "where a window hides the first tokens."),
    Mistake("weights transposed", SAME, "The rows of a matrix are its inputs: y = x @ W."),
]}
