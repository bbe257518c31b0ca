"""port/vectors.npz is what the equations say, and a port without torch can be held to it."""
import re
from pathlib import Path

import numpy as np
import pytest

import equations
from port import vectors

HERE = Path(__file__).parents[1]
FILE = np.load(vectors.FILE)
PAGE = (HERE / "vectors.md").read_text(encoding="utf-8")
LOADER = re.search("```python(.*?)```", PAGE, re.DOTALL)[1]


def test_written_anew_it_is_equal():
    anew = vectors.make()
    assert anew.keys() == set(FILE.files)
    for key, array in anew.items():
        assert FILE[key].dtype == np.float64
        np.testing.assert_allclose(FILE[key], array, rtol=0, atol=1e-12)
    assert vectors.FILE.stat().st_size < 200_000


def test_the_case_by_eye_has_round_numbers_which_stand_on_the_page():
    case = {key.split("/")[1]: FILE[key] for key in FILE.files if key.startswith("by_eye_0/")}
    assert case["A1"].tolist() == [[[[1, 0], pytest.approx([0.25, 0.75])]]]
    assert case["A2"].tolist() == [[[[1, 0], [0.5, 0.5]]]]
    assert case["lambda"] == pytest.approx(0.5)
    assert case["heads"].ravel() == pytest.approx([0.5, 0.5, 0.5, 3.5])
    assert case["y"].ravel() == pytest.approx([1.6, 0.8, 2.24, 0.16], abs=5e-5)  # the norm's eps
    for number in ("0.25", "0.75", "3.5", "2.24", "0.16"):
        assert number in PAGE


def test_lambda_vectors_are_unequal_and_no_norm_weight_is_constant():
    for case, settings in vectors.CASES.items():
        if settings["attn"] in ("diff", "diff_linear"):
            found = [tuple(FILE[f"{case}/lambda_{name}"]) for name in ("q1", "k1", "q2", "k2")]
            assert len(set(found)) == 4
            assert FILE[f"{case}/subln.weight"].std() > 0.1


def layer_in_numpy(x, w):
    """What a user would write."""
    return equations.layer("diff", w, x, n_head=4, depth=3)


@pytest.mark.parametrize("layer, worst", [
    (layer_in_numpy, []),
    (lambda x, w: equations.layer("diff", w, x, n_head=4, depth=4), ["lambda", "A", "heads", "y"]),
    (lambda x, w: equations.layer("diff", w, x, n_head=4, depth=3, theta=500), ["q", "k", "A1"]),
])
def test_the_lines_on_the_page_tell_right_from_wrong(layer, worst, capsys, monkeypatch):
    monkeypatch.chdir(HERE.parent)
    exec(LOADER, {"my_layer": layer})
    errors = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert list(errors) == ["q", "k", "v", "A1", "A2", "lambda", "A", "heads", "normed", "y"]
    assert all(float(errors[stage]) > 1e-3 for stage in worst)
    if not worst:
        assert max(map(float, errors.values())) < 1e-12


def test_the_lines_on_the_page_refuse_another_shape(monkeypatch):
    """numpy would subtract (1, 1, 16) from (2, 4, 16) without a word."""
    monkeypatch.chdir(HERE.parent)
    with pytest.raises(AssertionError, match="'y', \\(1, 1, 16\\)"):
        exec(LOADER, {"my_layer": lambda x, w: {"y": w["y"][:1, :1]}})


def test_grouped_keys_and_values_are_already_repeated():
    k, v = FILE["diff_grouped_3/k"], FILE["diff_grouped_3/v"]
    assert k.shape[1] == 8 and np.array_equal(k[:, 0:2], k[:, 2:4])
    assert v.shape[1] == 4 and np.array_equal(v[:, 0], v[:, 1])
    assert not np.array_equal(v[:, 1], v[:, 2])


def test_outputs_with_mistakes_are_all_apart():
    outputs = {key: FILE[key] for key in FILE.files if "/wrong/" in key} | {"": FILE["diff_3/y"]}
    assert len(outputs) > 10
    for one, y in outputs.items():
        for other, z in outputs.items():
            assert one == other or np.abs(y - z).max() > 0.01


def test_a_prefix_and_the_next_token_belong_to_the_text():
    for case in vectors.CASES:
        y = FILE[f"{case}/y"]
        np.testing.assert_allclose(FILE[f"{case}/y_prefix"], y[:, : vectors.PREFIX], atol=1e-12)
        assert np.abs(FILE[f"{case}/y_without_rotary"] - y).max() > 1e-3
