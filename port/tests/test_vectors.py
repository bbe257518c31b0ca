"""port/vectors.npz is what the equations say, and a port without torch can be held to it."""
import re
from pathlib import Path

import numpy as np
import pytest

import equations
from port import vectors
from port.mistakes import MISTAKES, SAME, find

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


def table_under(head):
    """The rows of the page's table with this head, each a list of its cells."""
    lines = PAGE[PAGE.index(f"| {head} |"):].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def sizes_of_cases():
    """{case: {letter: size}} of the page, by which its shapes are read."""
    sizes = {}
    for cases, *numbers, _ in table_under("arm and depth"):
        for case in re.findall("`(.*?)`", cases):
            sizes[case] = dict(zip(("H", "h", "d", "d_v"), map(int, numbers)), B=2, T=4, C=16)
    sizes["by_eye_0"] |= dict(B=1, T=2, C=2)
    return sizes


def shape_in(text, sizes):
    """(2, 4, 16) for "(B, T, C)"."""
    words = re.findall(r"\w+", text)
    return tuple(int(word) if word.isdigit() else sizes[word] for word in words)


def test_the_shapes_on_the_page_are_those_in_the_file():
    sizes = sizes_of_cases()
    shapes = {}
    for names, shape, _ in table_under("name"):
        shapes |= {name: shape for name in re.findall("`(.*?)`", names) if shape}
    assert "In `diff_v2` it is (B, h, T, 1)" in PAGE
    assert {key.split("/")[0] for key in FILE.files} == sizes.keys()
    unseen = set(shapes)
    for key in FILE.files:
        case, name = key.split("/", 1)
        name = re.sub("^wrong/.*", "wrong/<mistake>", name)
        if name not in shapes:  # a weight, or its gradient
            assert name.endswith(".weight") or re.match("(grad_)?lambda_", name), key
            weight = key.replace("/grad_", "/")
            assert FILE[key].shape == FILE[weight].shape
            continue
        shape = "(B, h, T, 1)" if key == "diff_v2_0/lambda" else shapes[name]
        assert FILE[key].shape == shape_in(shape, sizes[case]), key
        unseen.discard(name)
    assert not unseen


def test_the_page_names_the_outputs_with_mistakes():
    names = [key.split("/wrong/")[1] for key in FILE.files if "/wrong/" in key]
    paragraph = PAGE[PAGE.index("The mistakes are"):].split("\n\n")[0]
    mistakes, orders = paragraph.split("Two more")
    assert sorted(re.findall("`(.*?)`", paragraph)) == sorted(names)
    for name in re.findall("`(.*?)`", orders):
        assert find(name).verdict == SAME
    for name in re.findall("`(.*?)`", mistakes):
        assert all(m.verdict != SAME for m in MISTAKES if m.name == name)


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
