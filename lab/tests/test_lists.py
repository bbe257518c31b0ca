"""lab/lists.py: its lists, and what is counted in them."""
import numpy as np
import pytest
import torch

from lab import lists

POOLS = [[f"Name{i}" for i in range(60)], [f"word{i}" for i in range(60)]]


def test_lists_of_one_number_differ_in_the_crowd_alone():
    plain, words, right = lists.make_list(POOLS, 7, crowd=0)
    text, crowded, still_right = lists.make_list(POOLS, 7, crowd=16)
    assert right == still_right and words[right] == crowded[right]
    assert len(set(words)) == 32 and len(set(crowded)) == 17
    assert plain.split("\n")[33:] == text.split("\n")[33:]  # the examples and the question
    assert text.endswith(f"{text.split(chr(10))[right].split(':')[0]}:")


def test_a_crowd_keeps_weight_by_the_rank_of_its_lines():
    without = torch.full((1, 1, 5), 0.2)  # a list, a head, five lines
    A = torch.tensor([[[0.3, 0.1, 0.05, 0.15, 0.4]]])
    is_crowd = torch.tensor([[[True, True, True, False, False]]])
    is_right = torch.tensor([[[False, False, False, False, True]]])
    found = lists.kept(without, A, is_right, is_crowd)
    assert [pairs[0] for pairs in found.values()] == [
        pytest.approx(pair) for pair in ([0.3, 0.2], [0.1, 0.2], [0.05, 0.2], [0.15, 0.2],
                                         [0.4, 0.2])]


def test_the_weight_of_a_crowds_line_is_that_beside_another_wrong_one():
    gap = np.log(0.5 / (0.5 / 31))  # right 0.5, so the 31 others have 0.5 together
    row = dict(right=[[0.5]], crowd=[[0.1]], gap=[[gap]])
    assert lists.line_weight(row, 16) == pytest.approx((0.1 / 16) / (0.4 / 15))
