"""Layers as people write them get the right verdict, all its causes, or a sentence that helps."""
import math
import re

import pytest
import torch

from port import diagnose, given, search
from port.tests import right_layers as right
from port.tests import wrong_layers as wrong
from port.theirs import Port, Reading

torch.set_num_threads(1)  # for tensors as small as these, more are slower

RIGHT = [right.Right, right.Fused, right.Apart, right.ListOfHeads, right.ComplexTable,
         right.VectorsWithOnes, right.OneBlockForAll, right.OddOutput, right.HalfPrecision,
         right.Autocast, right.MaskedAfterwards, right.Buffers]
WRONG = [
    (wrong.GroupNormOverTime, "BROKEN", "norm over time, mean subtracted"),
    (wrong.CountsFromOne, "BROKEN", "norm over time, mean subtracted, lambda_init"),
    (wrong.NoMask, "BROKEN", "no mask"),
    (wrong.NoMaskAndScale, "BROKEN", "no mask, scale"),
    (wrong.NoMaskAndBothMapsTurned, "BROKEN", "no mask, rotary over both maps"),
    (wrong.BooleanMaskAdded, "BROKEN", "boolean mask added"),
    (wrong.MaskOnFirstMap, "BROKEN", "mask on one map"),
    (wrong.OffByOne, "BROKEN", "mask off by one"),
    (wrong.SoftmaxTwice, "DIFFERS", "softmax twice"),
    (wrong.MaskBetweenTwoSoftmaxes, "BROKEN", "mask between two softmaxes"),
    (wrong.ValuesTiled, "DIFFERS", "values tiled"),
    (wrong.MapsReadAsTokens, "BROKEN", "maps read as tokens"),
    (wrong.HeadsNotTransposed, "BROKEN", "heads not transposed"),
    (wrong.MergeNotTransposed, "BROKEN", "merge not transposed"),
    (wrong.RepeatedBeforeSplit, "DIFFERS", "repeated before split"),
    (wrong.NoNorm, "DIFFERS", "no norm"),
    (wrong.NormOverAllHeads, "DIFFERS", "norm over all heads, mean subtracted"),
    (wrong.NormAfterOutProj, "DIFFERS", "norm after out_proj, mean subtracted, factor"),
    (wrong.NoRotary, "CHOICE", "no rotary"),
    (wrong.RotaryOnOneMap, "DIFFERS", "rotary on one map"),
    (wrong.QueriesAhead, "DIFFERS", "rotary of queries ahead"),
    (wrong.NormBeforeSubtraction, "DIFFERS", "norm before subtraction"),
    (wrong.QKNorm, "DIFFERS", "qk-norm"),
    (wrong.NextLayersInit, "DIFFERS", "lambda_init"),
    (wrong.NoFactor, "DIFFERS", "factor"),
    (wrong.LambdaOfAScalar, "DIFFERS", "lambda"),
    (wrong.PlusForMinus, "DIFFERS", "lambda negative"),
    (wrong.PlainSoftmax, "DIFFERS", "plain softmax, no rotary"),
]


class FirstLayer(right.Right):
    lambda_init = 0.2


def names(verdict):
    return set(verdict.differs + verdict.choices)


def text_of(verdict):
    """The verdict as one line."""
    return " ".join(str(verdict).split())


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_layer_is_the_same(kind):
    verdict = diagnose(kind(), n_head=8, depth=3)
    assert verdict.kind == "SAME" and verdict.explained


@pytest.mark.parametrize("kind, weights", [
    (right.TransposedOutput, "out_proj.weight"),
    (right.AllTransposed, "k_proj.weight, out_proj.weight, q_proj.weight, v_proj.weight"),
    (right.FusedTransposed, "c_attn.weight"),
])
def test_transposed_weights_are_read_as_they_lie(kind, weights):
    verdict = diagnose(kind(), 8, 3)
    assert (verdict.kind, verdict.same) == ("SAME", ["weights transposed"])
    assert f"Here: {weights}." in text_of(verdict)


@pytest.mark.parametrize("kind, words", [
    (right.VectorsInTwo, "lq as lambda_q1 and lambda_q2, lk as lambda_k1 and lambda_k2"),
    (right.VectorsInOne, "lambdas as lambda_q2 and lambda_k2 and lambda_q1 and lambda_k1"),
    (right.VectorsInAList, "lambdas.* as lambda_q2, lambdas.* as lambda_k2, lambdas.* as lambda_q"),
])
def test_lambdas_vectors_may_lie_in_one_weight(kind, words):
    verdict = diagnose(kind(), 8, 3)
    assert verdict.kind == "SAME" and words in text_of(verdict)


def test_what_lies_like_lambdas_vectors_and_gives_another_lambda_is_asked_for():
    layer = wrong.VectorsInOneOfAnotherForm()
    with pytest.raises(ValueError, match=r"in no order of them .* {\"lambda\": \['lambdas']}"):
        diagnose(layer, 8, 3)
    assert diagnose(layer, 8, 3, names={"lambda": ["lambdas"]}).differs == ["lambda"]


def test_a_transposed_gate():
    layer = right.Version2()
    layer.lambda_proj = right.Transposed(64, 4)
    assert diagnose(layer, 4, version=2).same == ["weights transposed"]


@pytest.mark.parametrize("kv", [1, 2])
def test_grouped_keys_and_version_2_are_right(kv):
    assert diagnose(right.Right(kv), n_head=8, depth=3).kind == "SAME"
    assert diagnose(right.Version2(kv), n_head=4, version=2).kind == "SAME"


@pytest.mark.parametrize("kind, verdict, causes", WRONG)
def test_a_wrong_layer_is_named(kind, verdict, causes):
    found = diagnose(kind(), n_head=8, depth=3)
    assert found.kind == verdict and found.explained
    assert names(found) == set(causes.split(", "))


@pytest.mark.parametrize("kind, causes", [
    (wrong.GateWithoutSigmoid, "lambda"),
    (wrong.PairsByChunks, "V2 pairs by chunks"),
])
def test_a_wrong_second_version_is_named(kind, causes):
    found = diagnose(kind(), n_head=4, version=2)
    assert found.kind == "DIFFERS" and names(found) == {causes}


# ---- numbers are measured, and some are a choice

@pytest.mark.parametrize("kind, verdict, name, number", [
    (wrong.ConstantInit, "CHOICE", "lambda_init", "yours is 0.8000"),
    (right.AutocastConstantInit, "CHOICE", "lambda_init", "yours is 0.8"),
    (wrong.NextLayersInit, "DIFFERS", "lambda_init", "that of layer 4"),
    (wrong.Theta, "CHOICE", "rotary base", "yours is 500000"),
    (wrong.HalfRotary, "CHOICE", "rotary share", "Yours turns 4 of 8"),
    (wrong.TableTooWide, "DIFFERS", "rotary table", "yours is 100"),
])
def test_numbers_are_measured(kind, verdict, name, number):
    found = diagnose(kind(), n_head=8, depth=3)
    assert (found.kind, names(found)) == (verdict, {name})
    assert number in text_of(found)


# ---- what is seen from outside

@pytest.mark.parametrize("kind, name", [
    (wrong.MaskAfterSoftmax, "NaN"),
    (wrong.DropoutAlwaysOn, "random"),
    (wrong.TimeFirst, "mixes samples"),
    (wrong.OverHeads, "no past"),
    (wrong.LateLeak, "sees the future"),
    (wrong.ExpOverflows, "overflow"),
    (wrong.ScoresOverflow, "overflow"),
    (wrong.FlashDiffers, "switch"),
    (wrong.EvalDiffers, "switch"),
    (wrong.LambdaIsANumber, "dead weights"),
    (wrong.SameMapTwice, "dead weights"),
    (wrong.SameMapTwiceTransposed, "dead weights"),
])
def test_what_is_seen_from_outside(kind, name):
    verdict = diagnose(kind(), n_head=8, depth=3)
    assert verdict.kind == "BROKEN" and name in verdict.broken


@pytest.mark.parametrize("kind, name, words", [
    (wrong.LambdaBelowOne, "lambda bounded", "The paper's is 2."),
    (wrong.LambdaAboveZero, "lambda bounded", "The paper's is -1."),
    (wrong.RowsSumToOne, "rows sum to 1", "above it the outputs change their sign"),
    (wrong.Window, "longer text", "In a text of 272 tokens they part from token 100 on"),
])
def test_what_shows_only_with_another_lambda_or_in_a_longer_text(kind, name, words):
    verdict = diagnose(kind(), 8, 3)
    assert (verdict.kind, verdict.differs) == ("DIFFERS", [name])
    assert words in text_of(verdict) and "Otherwise our layer equals yours" in text_of(verdict)


@pytest.mark.parametrize("kind", [right.NormForEachHead, right.GainForEachHead])
def test_a_norm_weight_for_each_head_is_said_and_does_not_change_the_verdict(kind):
    verdict = diagnose(kind(), 8, 3)
    assert verdict.kind == "SAME" and "one weight serves all heads" in text_of(verdict)
    assert "NOTE" not in str(diagnose(right.Right(), 8, 3))


def test_a_leak_beyond_the_first_tokens_is_said_with_its_place():
    assert "In a text of 272 tokens" in text_of(diagnose(wrong.LateLeak(), 8, 3))


def test_a_lambda_near_1_does_not_make_a_right_layer_wrong():
    """There A_1 - lambda A_2 is small, so the norm's eps and rounding show."""
    class NearOne(right.Right):
        lambda_init = 0.9

    assert diagnose(NearOne(), 8, 3).kind == "CHOICE"


def test_one_mistake_is_told_once():
    norm = diagnose(wrong.NoNorm(), 8, 3)
    assert norm.differs == ["no norm"] and "built and never used: subln.weight" in text_of(norm)
    number = diagnose(wrong.LambdaIsANumber(), 8, 3)
    assert number.broken == ["dead weights"] and number.differs == []
    assert "lambda is a constant" in text_of(number)


def test_an_unused_weight_of_a_norm_does_not_make_a_layer_wrong():
    class Unused(right.Right):
        def norm(self, y):
            return torch.nn.functional.rms_norm(y, [16], eps=1e-5)

    verdict = diagnose(Unused(), 8, 3)
    assert verdict.kind == "CHOICE" and verdict.choices == ["no norm weight"]


@pytest.mark.parametrize("kind", [right.SecondNorm, right.WideSecondNorm])
def test_a_second_norm_that_is_never_used_is_said_and_does_not_change_the_verdict(kind):
    verdict = diagnose(kind(), 8, 3)
    assert verdict.kind == "SAME" and "unused norm" in str(verdict) and "norm2" in str(verdict)


def test_a_start_from_zeros_is_said_and_does_not_change_the_verdict():
    verdict = diagnose(right.ZeroLambdas(), 8, 3)
    assert verdict.kind == "SAME" and "lambda_q1, lambda_k1" in str(verdict)
    assert "zeros" not in str(diagnose(right.Right(), 8, 3))
    out = right.Right()
    torch.nn.init.zeros_(out.out_proj.weight)  # this one leaves 0 at the first step
    assert "zeros" not in str(diagnose(out, 8, 3))


def test_a_far_start_of_lambda_is_said_and_does_not_change_the_verdict():
    """lambda = exp(8) - exp(2) + 0.556"""
    verdict = diagnose(right.LargeLambdas(), 8, 3)
    assert verdict.kind == "SAME"
    assert "Here their std is 0.79, and lambda is 2974." in text_of(verdict)
    assert "std" not in str(diagnose(right.Right(), 8, 3))


def test_its_rounding_is_said():
    assert "float16 or bfloat16" in str(diagnose(right.HalfPrecision(), 8, 3))
    assert "float16" not in str(diagnose(right.Right(), 8, 3))


def test_what_is_not_on_the_list_has_no_cause():
    class Unknown(right.Right):
        def subtract(self, A, v):
            return super().subtract(A, v).abs()

    verdict = diagnose(Unknown(), 8, 3)
    assert (verdict.kind, verdict.explained, names(verdict)) == ("DIFFERS", False, set())
    assert "Nothing on the list explains it" in str(verdict)
    assert str(verdict).startswith("DIFFERS, not explained\n")


def test_a_search_that_is_cut_off_by_its_clock_does_not_say_that_nothing_explains_it(monkeypatch):
    class Unknown(right.Right):
        def subtract(self, A, v):
            return super().subtract(A, v).abs()

    monkeypatch.setattr("port.verdict.SECONDS", 0.05)
    text = text_of(diagnose(Unknown(), 8, 3))
    assert re.search(r"No cause was found in 0 seconds, after \d+ combinations\. They part", text)
    assert "Nothing on the list" not in text


def test_the_combinations_of_other_readings_are_not_counted(monkeypatch):
    """A lambda that is a number leaves n_head open, so other numbers of heads are tried, too."""
    class Unknown(wrong.LambdaOfAScalar):
        def subtract(self, A, v):
            return super().subtract(A, v).abs()

    clocks = []

    class Kept(search.Clock):
        def __init__(self):
            super().__init__()
            clocks.append(self)

    monkeypatch.setattr("port.verdict.Clock", Kept)
    text = text_of(diagnose(Unknown(), 8, 3))
    assert 0 < int(re.search(r"(\d+) combinations", text)[1]) < clocks[0].tries


# ---- what a user may say wrongly

def test_an_encoder():
    verdict = diagnose(wrong.NoMask(), 8, 3)
    assert "If the layer is an encoder, say causal = False" in text_of(verdict)
    assert diagnose(wrong.NoMask(), 8, 3, causal=False).kind == "SAME"
    with pytest.raises(ValueError, match="is causal = True meant"):
        diagnose(right.Right(), 8, 3, causal=False)


@pytest.mark.parametrize("kind, said, sentence", [
    (right.Right, dict(n_head=4), "is version = 1, n_head = 8 meant"),
    (right.Right, dict(n_head=16), "is version = 1, n_head = 8 meant"),
    (right.Right, dict(version=2), "is version = 1, n_head = 8 meant"),
    (right.Version2, dict(), "is version = 2, n_head = 4 meant"),
    (right.Version2, dict(version=2), "is version = 2, n_head = 4 meant"),
    (wrong.LambdaOfAScalar, dict(n_head=4), "is n_head = 8 meant"),
    (wrong.Block, dict(), "Is it a whole block.* layer = yours.attn"),
    (wrong.Residual, dict(), "it adds a residual"),
    (right.VectorsInOne, dict(n_head=4), "is version = 1, n_head = 8 meant"),
    (wrong.UnknownWeights, dict(), r"what is thing \(4, 1, 16\), stuff \(4, 1, 16\)\? Say it with"),
    (wrong.WideOutput, dict(), r"out_proj.weight \(64, 128\) was read as o, and \(64, 64\) is"),
    (wrong.NumpyLayer, dict(), "PyTorch layers only.*port/vectors.md"),
    (right.Right, dict(n_head=7), "is even, and not 7"),
    (right.Right, dict(version=3), "version is 1 or 2, not 3"),
    (right.Right, dict(n_head="8"), "n_head is a whole number, not '8'"),
    (right.Right, dict(n_head=8.0), "n_head is a whole number, not 8.0"),
    (right.Right, dict(depth="3"), "depth is a whole number, not '3'"),
    (right.Right, dict(depth=-1), "depth counts the layers from 0"),
    (right.Right, dict(version="1"), "version is a whole number, not '1'"),
    (right.Right, dict(causal="False"), "causal is True or False, not 'False'"),
    (right.Right, dict(names=["q"]), r"names is {role: .*and not \['q'\]"),
    (right.Right, dict(names={"q": 3}), "names is {role: .*and not {'q': 3}"),
    (right.Right, dict(names={"q": [3]}), "names is {role: "),
    (right.Right, dict(names={3: "q_proj.weight"}), "names is {role: "),
    (right.Right, dict(names={"q": "W_q"}), "names has 'q': 'W_q'.*the weights are lambda_q1"),
])
def test_a_sentence_that_helps(kind, said, sentence):
    with pytest.raises(ValueError, match=sentence):
        diagnose(kind(), **dict(n_head=8, depth=3) | said)


def test_a_note_is_no_verdict_on_a_layer_that_is_not_compared():
    class Residual(right.SecondNorm):
        def forward(self, x):
            return x + super().forward(x)

    with pytest.raises(ValueError, match="it adds a residual"):
        diagnose(Residual(), 8, 3)


def test_a_class_or_nothing_is_no_layer():
    for layer in (right.Right, None):
        with pytest.raises(ValueError, match="add layer = YourAttention"):
            diagnose(layer)


def test_names_takes_several_weights_a_role():
    class Odd(right.Apart):
        def __init__(self):
            super().__init__()
            self.alpha, self.beta_ = self.wq1, self.wq2
            del self.wq1, self.wq2

        def forward(self, x):
            self.__dict__.update(wq1=self.alpha, wq2=self.beta_)
            return super().forward(x)

    names = {"q": ["alpha.weight", "beta_.weight"]}
    verdict = diagnose(Odd(), 8, 3, names=names)
    assert verdict.kind == "SAME"
    assert "alpha" not in str(verdict)  # it was told, and so is no guess


def test_only_what_is_a_guess_is_said():
    lines = str(diagnose(right.Right(), 8, 3)).splitlines()
    assert lines[1] == "read with n_head=8, depth=3, version=1, causal=True"
    assert "c_attn.weight as qkv" in str(diagnose(right.Fused(), 8, 3))


def test_a_depth_that_is_assumed_is_said():
    assert "depth=0 (assumed)" in str(diagnose(FirstLayer(), 8))
    assert "depth=0," in str(diagnose(FirstLayer(), 8, 0))


def test_a_depth_that_was_not_said_is_asked_for_where_all_else_is_right():
    """Ours is the assumption, so a right layer of depth 3 is no mistake of its user's."""
    for layer in (right.Right(), wrong.NoRotary()):  # what one may choose is no other mistake
        with pytest.raises(ValueError, match="is depth = 3 meant. It was not said, and lambda_init "
                                             "is that of layer 3"):
            diagnose(layer, 8)


def test_a_depth_that_was_said_or_is_not_all_that_is_wrong_has_a_verdict():
    said = diagnose(right.Right(), 8, 0)
    assert said.differs == ["lambda_init"] and "that of layer 3. Is depth right" in text_of(said)
    other = diagnose(wrong.NormOverAllHeads(), 8)
    assert {"lambda_init", "norm over all heads"} <= set(other.differs)

    class BeforeTheFirst(right.Right):
        lambda_init = 0.8 - 0.6 * math.exp(0.3)

    assert diagnose(BeforeTheFirst(), 8).differs == ["lambda_init"]  # no layer has depth -1


def test_what_forward_was_given_is_said():
    text = text_of(diagnose(right.ComplexTable(), 8, 3))
    assert "called with freqs_cis: a rotary table; attn_mask: float, -inf above the diag" in text
    assert "called with" not in str(diagnose(right.Right(), 8, 3))


def test_a_leak_in_spite_of_a_mask_is_said_only_where_there_is_one():
    assert "in spite of a mask" in text_of(diagnose(wrong.GroupNormOverTime(), 8, 3))
    assert "in spite of" not in text_of(diagnose(wrong.NoMask(), 8, 3))
    assert "in spite of" not in text_of(diagnose(wrong.NoMaskAndScale(), 8, 3))


def test_our_layer_equals_a_right_one_without_changes():
    assert "\nOur layer equals yours to" in str(diagnose(right.Right(), 8, 3))
    assert "\nWith these changes our layer equals" in str(diagnose(wrong.NoFactor(), 8, 3))


def test_an_order_is_no_change():
    class MapsInBlocks(right.Right):
        """Head n has the maps n and n + 4."""

        def subtract(self, A, v):
            return (A[:, :4] - self.lam() * A[:, 4:]) @ v

    text = str(diagnose(MapsInBlocks(), 8, 3))
    assert "\nWith its weights in this order our layer equals" in text


def test_a_factor_is_that_of_the_ports_own_lambda_init():
    class OfAnotherLayer(wrong.NoFactor):
        lambda_init = 0.8 - 0.6 * math.exp(-0.3 * 4)

    assert "With your lambda_init the paper's is 0.3807, yours is 1." in text_of(
        diagnose(OfAnotherLayer(), 8, 3))


def test_it_asks_only_what_may_be_wrong():
    class Unknown(right.Right):
        def subtract(self, A, v):
            return super().subtract(A, v).abs()

    class UnknownLeak(wrong.NoMask):
        def subtract(self, A, v):
            return super().subtract(A, v).abs()

    class UnknownNorm(right.Right):
        def finish(self, y):
            return torch.nn.functional.rms_norm(self.out_proj(self.merge(y)), [64]).abs()

    assert str(diagnose(Unknown(), 8, 3)).endswith("of the largest output.")
    assert str(diagnose(UnknownLeak(), 8, 3)).endswith("Is causal right?")
    ending = "Is a weight transposed (out_proj.weight)?"
    assert str(diagnose(UnknownNorm(), 8, 3)).endswith(ending)


def test_what_was_not_found_is_said():
    assert "Not found: lambda_q1, lambda_k1" in text_of(diagnose(wrong.LambdaOfAScalar(), 8, 3))
    assert "Not found: norm, lambda_q1" in text_of(diagnose(wrong.PlainSoftmax(), 8, 3))


def test_each_draw_runs_with_its_own_weights():
    port = Port(right.Right(), Reading(8, 3, 1, True), None)
    x = port.input(12, 64)
    draws = [port.draw(seed=seed) for seed in (1, 2, 1)]
    for filled in draws:
        assert torch.equal(filled.parts["o"][0].float(), filled.weights["out_proj.weight"])
    first, second, again = (filled.run({}, x) for filled in draws)
    assert torch.equal(first, again) and not torch.equal(first, second)


def test_only_a_fused_weight_has_orders():
    assert given.orders("", 4) == [""]
    assert given.orders("qk", 2) == ["qk", "qkqk", "qkqk", "qkqkqkqk"]


def test_a_function_of_weights():
    assert diagnose(right.function, 8, 3).kind == "SAME"


def test_a_function_of_weights_may_be_read_otherwise_too():
    with pytest.raises(ValueError, match="is causal = True meant"):
        diagnose(right.function, 8, 3, causal=False)
