"""bench.py: a round of each verb."""
import re

import pytest

import bench
from helpers import TOY
from model import ATTENTION


@pytest.mark.parametrize("verb, parts", [("speed", 2), ("decode", 1)])
def test_every_arm_is_timed_and_compared_to_the_first(verb, parts, monkeypatch, capsys):
    monkeypatch.setitem(bench.train.PRESETS, "toy", bench.train.parse(TOY)[0])
    bench.main([verb, "--preset=toy", "--T=32,64", "--rounds=1"])
    said = capsys.readouterr().out
    rows = re.findall(r"(\w+) +([\d.]+) ms, ([\d.]+) \(([\d.]+) to ([\d.]+)\)", said)
    assert [row[0] for row in rows] == 2 * parts * list(ATTENTION)
    for arm, milliseconds, *ratios in rows:
        assert float(milliseconds) > 0
        assert ratios[0] == ratios[1] == ratios[2]  # there is only one round
        assert ratios[0] == "1.00" or arm != "softmax"
    sizes = re.findall(r"(\w+) +([\d,]+) bytes of state", said)
    if verb == "decode":  # 16 and 48 keys and values of 32 channels, 4 bytes each
        assert [size for arm, size in sizes if arm == "softmax"] == ["4,096", "12,288"]
        assert len({size for arm, size in sizes if arm == "linear"}) == 1  # it does not grow
