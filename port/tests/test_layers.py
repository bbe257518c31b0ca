"""Layers as people write them get the right verdict, all its causes, or a sentence that helps."""
import pytest
import torch

from model import Diff, GPTConfig
from port import diagnose
from port.roles import NoVerdict
from port.tests import right_layers as right
from port.tests import wrong_layers as wrong

torch.set_num_threads(1)

RIGHT = [
    right.Right, lambda: right.Right(1), lambda: right.Right(2), right.Fused, right.Apart,
    right.ListOfHeads, right.TransposedOutput, right.AllTransposed, right.FusedTransposed,
    right.VectorsInTwo, right.VectorsInOne, right.VectorsInAList, right.VectorsWithOnes,
    right.OneBlockForAll, right.OddOutput, right.NormForEachHead, right.GainForEachHead,
    right.MaskedAfterwards, right.Buffers, right.ComplexTable, right.Version2,
    lambda: right.Version2(1), lambda: right.Version2(2), right.HalfPrecision, right.Autocast,
    right.SecondNorm, right.WideSecondNorm, right.Talkative, right.ZeroLambdas, right.LargeLambdas,
    right.LambdaForEachHead, right.GroupsTiled,
]
WRONG = [  # all causes
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
    (wrong.ValuesApart, "DIFFERS", "values apart, value width"),
    (wrong.ValuesApartNoMask, "BROKEN", "values apart, value width, no mask"),
    (wrong.NarrowValues, "CHOICE", "value width"),
    (wrong.NormInVersion2, "DIFFERS", "norm in version 2, no norm weight"),
    (wrong.MapsReadAsTokens, "BROKEN", "maps read as tokens"),
    (wrong.HeadsNotTransposed, "BROKEN", "heads not transposed"),
    (wrong.MergeNotTransposed, "BROKEN", "merge not transposed"),
    (wrong.RepeatedBeforeSplit, "DIFFERS", "repeated before split"),
    (wrong.NoNorm, "DIFFERS", "no norm"),
    (wrong.NormOverAllHeads, "DIFFERS", "norm over all heads, mean subtracted"),
    (wrong.NormAfterOutProj, "DIFFERS", "norm after out_proj, mean subtracted, factor"),
    (wrong.NoRotary, "CHOICE", "no rotary"),
    (wrong.Theta, "CHOICE", "rotary base"),
    (wrong.TableTooWide, "DIFFERS", "rotary table"),
    (wrong.HalfRotary, "CHOICE", "rotary share"),
    (wrong.RotaryOnOneMap, "DIFFERS", "rotary on one map"),
    (wrong.QKNorm, "DIFFERS", "qk-norm"),
    (wrong.ConstantInit, "CHOICE", "constant lambda_init"),
    (right.AutocastConstantInit, "CHOICE", "constant lambda_init"),
    (wrong.NextLayersInit, "DIFFERS", "lambda_init"),
    (wrong.NoFactor, "DIFFERS", "factor"),
    (wrong.LambdaOfAScalar, "DIFFERS", "lambda"),
    (wrong.VectorsInOneOfAnotherForm, "DIFFERS", "lambda"),
    (wrong.PlusForMinus, "DIFFERS", "lambda negative"),
    (wrong.LambdaBelowOne, "DIFFERS", "lambda bounded"),
    (wrong.LambdaAboveZero, "DIFFERS", "lambda bounded"),
    (wrong.RowsSumToOne, "DIFFERS", "rows sum to 1"),
    (wrong.Window, "DIFFERS", "length"),
    (wrong.GateWithoutSigmoid, "DIFFERS", "lambda"),
    (wrong.PairsByChunks, "DIFFERS", "V2 pairs by chunks"),
]
FROM_OUTSIDE = [
    (wrong.MaskAfterSoftmax, "NaN"), (wrong.ExpOverflows, "NaN"),
    (wrong.DropoutAlwaysOn, "dropout"), (wrong.TimeFirst, "mixes samples, no past"),
    (wrong.OverHeads, "no past"), (wrong.LateLeak, "sees the future"),
    (wrong.EvalDiffers, "switch"), (wrong.FlashDiffers, "switch"),
    (wrong.ScoresOverflow, "overflow"), (wrong.SameMapTwice, "dead weights"),
    (wrong.SameMapTwiceTransposed, "dead weights"), (wrong.LambdaIsANumber, "dead weights"),
    (wrong.DetachedAsItTrains, "dead weights"), (wrong.Noisy, "random"),
    (wrong.SizesOfNoOther, "sees the future"),
]


def head_of(kind):
    """What a user must say of a layer: n_head, if no weight shows it."""
    return dict(n_head=8) if kind is wrong.LambdaOfAScalar else {}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_layer_is_the_same_though_nothing_but_its_depth_is_said(kind):
    verdict = diagnose(kind(), depth=3)
    assert verdict.kind == "SAME" and verdict.explained


@pytest.mark.parametrize("kind, name", [
    (right.HalfPrecision, "rounding"), (right.ZeroLambdas, "start from zeros"),
    (right.AllTransposed, "weights transposed"), (right.GroupsTiled, "groups tiled"),
    (right.SecondNorm, "unused norm"),
])
def test_what_is_said_beside_the_verdict(kind, name):
    names = diagnose(kind(), depth=3).names
    assert name in names["NOTE"] + names["SAME"]


@pytest.mark.parametrize("kind, verdict, causes", WRONG)
def test_a_wrong_layer_is_named(kind, verdict, causes):
    found = diagnose(kind(), depth=3, **head_of(kind))
    assert found.kind == verdict and found.explained
    assert set(found.names["DIFFERS"] + found.names["CHOICE"]) == set(causes.split(", "))


@pytest.mark.parametrize("kind, names", FROM_OUTSIDE)
def test_what_is_seen_from_outside(kind, names):
    verdict = diagnose(kind(), depth=3)
    assert verdict.kind == "BROKEN" and set(verdict.names["BROKEN"]) == {*names.split(", ")}


@pytest.mark.parametrize("kind", [wrong.QueriesAhead, wrong.NormBeforeSubtraction,
                                  wrong.PlainSoftmax])
def test_what_is_not_on_the_list_differs(kind):
    verdict = diagnose(kind(), n_head=8, depth=3)
    assert verdict.kind == "DIFFERS" and not verdict.explained


def test_the_papers_layer_in_steps_is_model_py():
    layer = Diff(GPTConfig(n_embd=64, n_head=8), depth=3)
    verdict = diagnose(layer, depth=3)
    assert verdict.kind == "SAME" and not verdict.names["SAME"]


@pytest.mark.parametrize("kind, said, sentence", [
    (right.Right, dict(n_head=4), "is n_head = 8"),
    (right.Version2, dict(n_head=8), "is n_head = 4 meant"),
    (right.Version2, dict(version=1), "is version = 2 meant"),
    (right.Right, dict(causal=False), "is causal = True meant"),
    (wrong.LambdaOfAScalar, {}, "say n_head"),
    (wrong.Residual, {}, "it adds a residual"),
    (wrong.Block, {}, "."),
    (wrong.UnknownWeights, {}, "what is thing, stuff"),
    (wrong.Greek, {}, "what is γ"),
    (wrong.WideOutput, {}, r"out_proj.weight \(64, 128\) as o"),
    (right.Right, dict(names={"q": "W_q"}), "there is no weight 'W_q'"),
    (wrong.NumpyLayer, {}, "there is no layer"),
    (lambda: right.function, {}, "there is no layer"),
])
def test_a_sentence_that_helps(kind, said, sentence):
    with pytest.raises(NoVerdict, match=sentence):
        diagnose(kind(), depth=3, **said)


def test_what_the_user_says_counts():
    class Wide(right.Right):
        """lambda's vectors are as wide as both maps."""

        def __init__(self):
            super().__init__()
            for name in right.VECTORS:
                setattr(self, name, torch.nn.Parameter(torch.randn(16) / 10))

    assert diagnose(Wide(), n_head=8, depth=3).kind == "SAME"
    assert diagnose(Wide(), depth=3).kind == "SAME"


def test_an_encoder():
    assert diagnose(wrong.NoMask(), depth=3, causal=False).kind == "SAME"


def test_a_depth_that_is_not_said_is_that_of_lambda_init():
    assert diagnose(right.Right()).kind == "SAME"
    assert diagnose(right.Right(), depth=0).names["DIFFERS"] == ["lambda_init"]
