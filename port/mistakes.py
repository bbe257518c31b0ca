"""
The list of mistakes that ports make, as data.

BROKEN    sees the future, gives NaN, does not learn, ...
DIFFERS   computes something else than the paper
CHOICE    the paper's layer, but for something that one may choose
SAME      the paper's layer, with its weights in another usual order
NOTE      is said beside the verdict, and does not change it

A new mistake is a function in port/wrong.py and an entry in BY_CODE.
`python -m port.pages` then writes port/mistakes.md anew.
"""
import inspect
import textwrap
from dataclasses import dataclass, field

from port import paper, wrong

BROKEN, DIFFERS, CHOICE, SAME, NOTE = "BROKEN", "DIFFERS", "CHOICE", "SAME", "NOTE"


@dataclass(frozen=True)
class Mistake:
    name: str
    verdict: str
    steps: dict = field(default_factory=dict)  # {step of the paper: the function in its place}
    text: str = ""  # what is said of it. If empty, the docstring of that function
    leaks: bool = False  # by itself it lets tokens see the future
    is_sharp: bool = False  # it does not show where all maps are flat
    needs_lambda: bool = False  # its outputs depend on lambda even where all maps are flat
    is_rare: bool = False  # it counts as two when the fewest mistakes are tried first
    needs_order: bool = False  # it does not show where the order of earlier tokens plays no part
    only: str = ""  # where it is possible, if not in every layer: see Search.kinds

    @property
    def step(self):
        return next(iter(self.steps))

    @property
    def function(self):
        return self.steps[self.step]

    @property
    def sentence(self):
        return self.text or " ".join(self.function.__doc__.split())

    @property
    def paper_code(self):
        """The lines of the step that it replaces."""
        steps = paper.VERSION_2 if self.only == "version 2" else paper.PAPER
        return body(getattr(steps, self.step))

    @property
    def port_code(self):
        return body(self.function)


def body(function):
    """The lines of a function below its head and its docstring."""
    lines = inspect.getsource(function).splitlines()
    docstring = (function.__doc__ or "").splitlines()
    return textwrap.dedent("\n".join(lines[1 + len(docstring) :]))


# what is seen from outside, whatever the layer looks like inside
FROM_OUTSIDE = [
    Mistake("sees the future", BROKEN, text="A token changes the outputs of earlier ones. "
            "Validation loss is too good, and generation bad."),
    Mistake("NaN", BROKEN, text="Outputs are NaN. Usual: -inf is put in after the softmax."),
    Mistake("random", BROKEN, text="In eval mode one input gives two outputs. Usual: F.dropout(x) "
            "without training=self.training. Set the dropout to 0 and run again for the rest."),
    Mistake("mixes samples", BROKEN, text="Samples of a batch are mixed. Usual: (T, B, C) read as "
            "(B, T, C)."),
    Mistake("no past", BROKEN, text="No token uses an earlier one. Usual: q @ k.mT before "
            "transpose(1, 2), so that heads attend to heads."),
    Mistake("dead weights", BROKEN, text="Some weights, or some rows of them, have no effect, so "
            "they never learn."),
    Mistake("switch", BROKEN, text="Two settings of one layer, or train() and eval(), give "
            "different outputs."),
    Mistake("length", BROKEN, text="A token's output changes as the text behind it grows, so "
            "generation is bad."),
    Mistake("overflow", BROKEN, text="Larger inputs give NaN or infinity: float16 ends at 65504. "
            "Usual: exp without the maximum taken off, or scores that are scaled after the "
            "product."),
    Mistake("unused norm", NOTE, text="The weight of a norm has no effect: it is built and never "
            "used."),
]

# what is measured, once our layer equals the port
BY_NUMBER = [
    Mistake("one map", DIFFERS, text=(
        "The second map has no effect: lambda A_2 is gone, or A_2 is A_1. In the paper lambda "
        "A_2 is subtracted.")),
    Mistake("plain softmax", DIFFERS, text=(
        "This is softmax attention: nothing is subtracted. In the paper lambda A_2 is.")),
    Mistake("scale", DIFFERS, text=(
        "Scores are divided by another number. In the paper it is sqrt(d), d being the "
        "channels of one map's query.")),
    Mistake("lambda", DIFFERS, text=(
        "lambda has another form, which learns at another rate. In the paper it is "
        "exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init.")),
    Mistake("lambda negative", DIFFERS, text=(
        "The second map is added, not subtracted: lambda is negative. In the paper lambda A_2 is "
        "subtracted.")),
    Mistake("lambda bounded", DIFFERS, text=(
        "lambda is kept above or below a number. In the paper it has no bounds.")),
    Mistake("rows sum to 1", DIFFERS, text=(
        "The rows of A_1 - lambda A_2 are divided by their sum. The norm hides that where lambda "
        "is below 1, and above it the outputs change their sign. In the paper rows sum to "
        "1 - lambda.")),
    Mistake("lambda_init", DIFFERS, text=(
        "lambda_init is not that of this layer. In the paper it is 0.8 - 0.6 exp(-0.3 l), and "
        "l counts the layers from 0.")),
    Mistake("lambda_init", CHOICE, text=(
        "lambda_init is another number. In the paper it is 0.8 - 0.6 exp(-0.3 l), and l "
        "counts the layers from 0. A constant may be meant: the paper tries one. In a small "
        "model here 0.8 in all layers did better where the embedding starts small (0.019 nats "
        "ahead of softmax in place of 0.041 behind), and worse where it starts large (0.080 "
        "behind in place of 0.016; n = 20, lab/results/start.md).")),
    Mistake("factor", DIFFERS, text=(
        "The normed output is multiplied by another number. In the paper it is 1 - "
        "lambda_init, so that gradients are as large as a Transformer's.")),
    Mistake("value width", CHOICE, text=(
        "A value has another width. In the paper it has 2d channels, so that V is as large as "
        "Q, and in version 2 d.")),
    Mistake("rotary base", CHOICE, text=(
        "The rotary embedding has another theta. In the paper's code it is 10000.")),
    Mistake("rotary table", DIFFERS, text=(
        "The rotary embedding turns as if theta were 100. In the paper's code it is 10000, "
        "the square. Usual: the table was made for 2d channels.")),
    Mistake("rotary share", CHOICE, text=(
        "The rotary embedding turns some channels of a query. In the paper it turns all.")),
    Mistake("longer text", DIFFERS, text=(
        "In a longer text the layer computes something else, as where a window hides the first "
        "tokens. In the paper each token sees all earlier ones.")),
    Mistake("weights transposed", SAME, text=(
        "The rows of a matrix are its inputs: y = x @ W. In the paper's code they are its outputs, "
        "as those of nn.Linear.")),
]

# what is found by trying, one function in place of another
BY_CODE = [
    Mistake("no mask", DIFFERS, dict(maps=wrong.no_mask), leaks=True),
    Mistake("mask inverted", DIFFERS, dict(maps=wrong.mask_inverted), leaks=True),
    Mistake("mask after softmax", DIFFERS, dict(maps=wrong.mask_after_softmax), leaks=True),
    Mistake("mask off by one", DIFFERS, dict(maps=wrong.mask_off_by_one), leaks=True),
    Mistake("mask off by one", DIFFERS, dict(maps=wrong.mask_off_by_one_multiplied), leaks=True),
    Mistake("mask multiplied", DIFFERS, dict(maps=wrong.mask_multiplied), leaks=True),
    Mistake("boolean mask added", DIFFERS, dict(maps=wrong.mask_of_booleans_added), leaks=True),
    Mistake("boolean mask added", DIFFERS, dict(maps=wrong.mask_of_booleans_added_to_the_past),
            leaks=True, is_rare=True),
    Mistake("mask on one map", DIFFERS, dict(maps=wrong.mask_on_first_map), leaks=True,
            needs_lambda=True, is_rare=True),
    Mistake("mask on one map", DIFFERS, dict(maps=wrong.mask_on_second_map), leaks=True,
            needs_lambda=True, is_rare=True),
    Mistake("softmax twice", DIFFERS, dict(subtract=wrong.softmax_twice), leaks=True,
            needs_lambda=True, is_rare=True),
    Mistake("softmax twice", DIFFERS, dict(subtract=wrong.softmax_twice_with_masks),
            needs_lambda=True, is_rare=True),
    Mistake("mask between two softmaxes", DIFFERS,
            dict(subtract=wrong.mask_between_two_softmaxes), leaks=True, needs_lambda=True,
            is_rare=True),
    Mistake("one softmax", DIFFERS, dict(subtract=wrong.one_softmax)),
    Mistake("one softmax", DIFFERS, dict(subtract=wrong.one_softmax_without_mask), leaks=True,
            is_rare=True),
    Mistake("negative weights cut", DIFFERS, dict(subtract=wrong.negative_weights_cut),
            is_sharp=True),
    Mistake("norm before subtraction", DIFFERS,
            dict(subtract=wrong.norm_before_subtraction, norm=wrong.gain_alone), is_sharp=True,
            is_rare=True, only="version 1"),
    Mistake("maps read as tokens", DIFFERS, dict(split=wrong.maps_read_as_tokens), leaks=True,
            is_sharp=True),
    Mistake("maps read as tokens", DIFFERS, dict(subtract=wrong.outputs_read_as_tokens), leaks=True,
            needs_lambda=True, is_rare=True),
    Mistake("heads not transposed", DIFFERS, dict(split=wrong.split_without_transpose), leaks=True),
    Mistake("heads not transposed", DIFFERS, dict(split=wrong.split_maps_without_transpose),
            leaks=True),
    Mistake("merge not transposed", DIFFERS, dict(merge=wrong.merge_without_transpose), leaks=True),
    Mistake("merge not transposed", DIFFERS, dict(merge=wrong.merge_channels_first), leaks=True),
    Mistake("values tiled", DIFFERS, dict(group_values=wrong.tile_over_maps), needs_lambda=True),
    Mistake("keys and values tiled", DIFFERS, dict(group_values=wrong.tile_over_maps,
            group_keys=wrong.tile_over_maps), only="version 2"),
    Mistake("V2 pairs by chunks", DIFFERS, dict(group_values=wrong.pair_by_chunks,
            group_keys=wrong.pair_by_chunks), only="version 2"),
    Mistake("repeated before split", DIFFERS, dict(group_keys=wrong.repeat_before_split),
            is_sharp=True, only="grouped"),
    Mistake("lambda", DIFFERS, dict(lam=wrong.lam_without_sigmoid), only="version 2"),
    Mistake("no norm", DIFFERS, dict(norm=wrong.no_norm), only="version 1"),
    Mistake("norm in version 2", DIFFERS, dict(norm=wrong.norm_in_version_2), only="version 2"),
    Mistake("mean subtracted", DIFFERS, dict(rms=wrong.layer_norm)),
    Mistake("norm over all heads", DIFFERS, dict(norm=wrong.norm_over_heads)),
    Mistake("norm over time", DIFFERS, dict(norm=wrong.norm_over_time), leaks=True),
    Mistake("norm over time", DIFFERS, dict(norm=wrong.norm_over_time_and_heads), leaks=True),
    Mistake("norm over time", DIFFERS, dict(norm=wrong.norm_over_time_by_channel), leaks=True),
    Mistake("norm after out_proj", DIFFERS, dict(output=wrong.norm_after_out_proj)),
    Mistake("qk-norm", DIFFERS, dict(scores=wrong.scores_of_normed), is_sharp=True),
    Mistake("rotary over both maps", DIFFERS, dict(turn=wrong.turn_both_maps), is_sharp=True,
            needs_order=True, only="version 1"),
    Mistake("rotary over both maps", DIFFERS, dict(turn=wrong.turn_both_maps_by_halves),
            is_sharp=True, needs_order=True, only="version 1"),
    Mistake("rotary on one map", DIFFERS, dict(turn=wrong.turn_first_map), is_sharp=True,
            needs_order=True, is_rare=True, only="version 1"),
    Mistake("rotary on one map", DIFFERS, dict(turn=wrong.turn_first_map_by_halves), is_sharp=True,
            needs_order=True, is_rare=True, only="version 1"),
    Mistake("rotary of queries ahead", DIFFERS, dict(queries=wrong.queries_one_ahead),
            is_sharp=True, needs_order=True, is_rare=True),
    Mistake("no rotary", CHOICE, dict(turn=wrong.no_turn), is_sharp=True),
    Mistake("no norm weight", CHOICE, dict(gain=wrong.no_gain), only="norm without weight"),
    Mistake("norm weight 1 + w", SAME, dict(gain=wrong.gain_from_zero), only="norm with weight"),
    Mistake("heads alternate", SAME, dict(merge=wrong.merge_alternating)),
    Mistake("maps in blocks", SAME, dict(split=wrong.maps_in_blocks), is_sharp=True),
    Mistake("values in halves", SAME, dict(values=wrong.values_in_halves)),
    Mistake("groups tiled", SAME, dict(group_values=wrong.tile, group_keys=wrong.tile),
            only="grouped"),
    Mistake("rotary by halves", SAME, dict(turn=wrong.turn_by_halves), is_sharp=True,
            needs_order=True),
    Mistake("rotary backwards", SAME, dict(turn=wrong.turn_backwards), is_sharp=True,
            needs_order=True),
    Mistake("rotary backwards", SAME, dict(turn=wrong.turn_backwards_by_halves), is_sharp=True,
            needs_order=True),
]

# what is said of a layer beside the verdict
NOTES = [
    Mistake("start from zeros", NOTE, text="These weights are 0 in the layer as it was given, and "
            "their gradient is a product of zeros. If training starts so, they stay 0."),
    Mistake("start of lambda", NOTE, text="lambda's vectors start far from the paper's, which have "
            "std 0.1, so that lambda starts near lambda_init."),
    Mistake("norm weight for each head", NOTE, text="The norm has a weight for each head. In the "
            "paper one weight serves all heads."),
    Mistake("rounding", NOTE, text="The layer rounds to float16 or bfloat16 inside. What differs "
            "by less than that is not seen."),
]

MISTAKES = FROM_OUTSIDE + BY_NUMBER + BY_CODE + NOTES


# what no look at a layer shows
BEYOND_THE_LAYER = {
    "a judge that sees the future": "The test that a port has to pass may itself be wrong. The "
    "reference of a public benchmark (ResearchCodeBench db3d16d, pset/Diff-Transformer) adds its "
    "mask, and its own test gives it a boolean one, so there it leaks, and a port with masked_fill "
    "fails. Check a judge first: give its reference two texts that differ in the last token only, "
    "and compare the outputs before.",
    "a start from zeros that never leaves it": "The gradient of lambda_q1 is lambda_k1 times "
    "something, and the other way round: if both start at 0, both stay there. So do q2 and k2. "
    "A public converter that does so (axolotl-ai-cloud/diff-transformer 20acfc9, --zero-init) can "
    "never learn a minus. Start one of each pair at 0, and not both.",
    "no control": "Beside a differential arm belong softmax with half the heads, and one map minus "
    "the average.",
    "the gain is below your noise": "Run several seeds before you believe a difference.",
    "data and weights from one generator": "Arms with other weights then see other data.",
    "lambda is not logged": "With bounded logits and no norm it can turn into a plus.",
}


def find(name, verdict=None):
    """The first entry of that name, or the one of that name and verdict."""
    return next(m for m in MISTAKES if m.name == name and verdict in (None, m.verdict))
