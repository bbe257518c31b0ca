"""lab.port finds each mistake, alone and with others, and calls a right layer right."""
import itertools
import math
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from lab import port

torch.set_num_threads(1)  # for tensors as small as these, more are slower
INIT = 0.8 - 0.6 * math.exp(-0.3 * 3)  # lambda_init of depth 3
NUMBERS = {"scale": dict(scale=4.0), "lambda_init": dict(lambda_init=0.3, factor=0.7),
           "factor": dict(factor=1.0)}
COMMON = ["no mask", "merge not transposed", "no norm", "norm over all heads", "norm over time",
          "mean subtracted", "no rotary", "scale", "lambda_init", "factor"]
LAMBDAS = ["lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"]
GROUPED = ["repeated before split", "groups tiled"]  # else nothing is repeated: they are below
CODED = [row for row in port.MISTAKES if row[1] in port.COST and row[2] and row[0] not in GROUPED]
PAIRS = "torch.view_as_complex(m.unflatten(-1, (-1, 2)).contiguous())"
SPACE = vars(port).copy()
exec(port.PAPER, SPACE)  # with its rotary
ROTARY = {"fused": f"torch.view_as_real({PAIRS} * table).flatten(-2)",
          "halves": dict((m[0], m[3]) for m in CODED)["rotary by halves"]}


def made_with(*mistakes, version=1):
    """A function layer(x, w) with mistakes: rows of the list, or names of COMMON."""
    mistakes = [port.MISTAKE[m] if m in COMMON and m not in NUMBERS else m for m in mistakes]
    code = port.PAPER
    changes = [row for row in port.MISTAKES if row[1] == f"V{version}"]
    for row in changes + [row for row in mistakes if not isinstance(row, str)]:
        code = code.replace(row[2], row[3])
    space = vars(port).copy()
    exec(code, space)
    paper = port.SimpleNamespace(heads=4 * version, lambda_init=INIT)

    def layer(x, weights):
        parts = defaultdict(list)
        for name, weight in weights.items():
            parts[port.role_of(name, weight)].append(weight.double())
        w = port.ours(parts, paper, space["sizes"])
        w.factor = 1 - INIT if version == 1 else 1.0
        for mistake in mistakes:
            vars(w).update(NUMBERS[mistake] if isinstance(mistake, str) else {})
        return space["straight"](x.double(), w).float()

    return layer


@pytest.mark.parametrize("mistake", CODED, ids=[m[0] for m in CODED])
def test_each_mistake_alone(mistake):
    version = 2 if mistake[0] == "V2 pairs by chunks" or "gate" in mistake[2] else 1
    verdict = port.diagnose(made_with(mistake, version=version), 8, 3, version)
    assert verdict.differs + verdict.choices + verdict.same == [mistake[0]]
    assert verdict.kind == ("BROKEN" if verdict.sees_future else mistake[1])


@pytest.mark.parametrize("names", [*zip(NUMBERS), *itertools.combinations(COMMON, 2)])
def test_numbers_and_pairs_of_the_commonest(names):
    norms = sum("norm" in name or name == "mean subtracted" for name in names)
    if norms == 2 and ("no norm" in names or "mean subtracted" not in names):
        pytest.skip("a layer has one norm or none")
    verdict = port.diagnose(made_with(*names), 8, 3)
    assert verdict.explained and set(verdict.differs + verdict.choices) == set(names)
    assert verdict.kind == ("BROKEN" if verdict.sees_future else "DIFFERS")


def test_three_at_once():
    names = ["norm over time", "mean subtracted", "lambda_init"]
    verdict = port.diagnose(made_with(*names), 8, 3)
    assert verdict.kind == "BROKEN" and set(verdict.differs) == set(names)


class Layer(torch.nn.Module):
    """The paper's layer, written once more, with its weights in several ways. 4 heads, d = 8."""

    def __init__(self, way="", kv=4, wrong=""):
        super().__init__()
        self.way, self.wrong = way, wrong
        self.cut = [64, 16 * kv, 16 * kv]
        outs = {"fused": {"c_attn": sum(self.cut)}, "apart": dict(q1=32, q2=32, k1=32, k2=32, v=64),
                "heads": {f"{n}_{i}": 16 for n in "qkv" for i in range(4)}}
        outs = outs.get(way, {"to_q": 64, "to_k": 16 * kv, "to_v": 16 * kv})
        projections = {n: torch.nn.Linear(64, out, bias=False) for n, out in outs.items()}
        self.project = torch.nn.ModuleDict(projections)
        self.out = torch.nn.Linear(64, 64)
        self.norm = torch.nn.RMSNorm(16, eps=1e-5)
        self.table = torch.nn.Parameter(torch.ones(8), requires_grad=False)  # it stays so
        for name in LAMBDAS:
            setattr(self, name, torch.nn.Parameter(torch.randn(8) / 10))

    def forward(self, x, freqs_cis, use_mask=False):
        y = torch.cat([project(x) for project in self.project.values()], -1)
        q, k, v = y.split(self.cut, -1)
        if self.way == "apart":  # the maps are in two blocks
            q, k = [m.unflatten(-1, (2, 4, 8)).transpose(2, 3).flatten(2) for m in (q, k)]
        q, k = [m.unflatten(-1, (-1, 8)).transpose(1, 2) for m in (q, k)]  # (B, 8, T, 8)
        code = ROTARY.get(self.way, "rotary(m)")
        q, k = [eval(code, SPACE | {"m": m, "table": freqs_cis}).float() for m in (q, k)]
        repeat = 64 // self.cut[1]
        late = self.wrong != "repeated before split"
        order = [0, 2, 1, 3] if self.wrong == "groups tiled" else slice(None)
        k = k.unflatten(1, (-1, 1 + late)).repeat_interleave(repeat, 1)[:, order].flatten(1, 2)
        v = v.unflatten(-1, (-1, 16)).transpose(1, 2).repeat_interleave(repeat, 1)[:, order]
        s = q * self.table @ k.mT / math.sqrt(8)
        later = torch.ones_like(s).triu(1 if use_mask else 99) == 1  # a tensor would not do here
        A = s.masked_fill(later, -math.inf).softmax(-1)
        q1, k1, q2, k2 = [getattr(self, name) for name in LAMBDAS]
        q1 = q1.detach() if self.wrong == "dead weights" else q1
        A = A[:, 0::2] - ((q1 @ k1).exp() - (q2 @ k2).exp() + INIT) * A[:, 1::2]
        A = A.abs() if self.wrong == "unknown" else A
        y = self.norm(A @ v) * (1 - INIT)
        y = y + y.mean(0) if self.wrong == "mixes samples" else y
        y = y / 0 * 0 if self.wrong == "NaN" else y
        y = 2 * y if self.wrong == "switch" and not self.training else y
        return self.out(y.transpose(1, 2).flatten(2)), A


@pytest.mark.parametrize("way, kv", [("", 4), ("", 2), ("", 1), ("fused", 4), ("fused", 2),
                                     ("heads", 4), ("apart", 4), ("halves", 4), ("halves", 2)])
def test_the_right_layer_is_the_same_in_all_ways(way, kv):
    assert port.diagnose(Layer(way, kv), n_head=8, depth=3).kind == "SAME"


def test_version_2_and_grouped_keys():
    assert port.diagnose(made_with(version=2), 8, 3, version=2).kind == "SAME"
    for wrong in GROUPED:
        verdict = port.diagnose(Layer(kv=2, wrong=wrong), n_head=8, depth=3)
        assert verdict.explained and verdict.differs + verdict.same == [wrong]


def test_what_is_not_on_the_list_has_no_cause():
    verdict = port.diagnose(Layer(wrong="unknown"), n_head=8, depth=3)
    causes = verdict.differs + verdict.choices + verdict.same
    assert (verdict.kind, verdict.explained, causes) == ("DIFFERS", False, [])


def test_level_0_and_encoders():
    for wrong in ("mixes samples", "NaN", "switch", "dead weights"):
        verdict = port.diagnose(Layer(wrong=wrong), n_head=8, depth=3)
        assert verdict.kind == "BROKEN" and wrong in verdict.broken
    assert port.diagnose(made_with("no mask"), 8, 3, causal=False).kind == "SAME"


@pytest.mark.parametrize("text, code, words", [
    ("from lab.tests.test_port import Layer\nlayer, n_head, depth = Layer(), 8, 3", 0, "SAME"),
    ("from lab.tests.test_port import Layer\nlayer = Layer(wrong='NaN')", 1, "BROKEN"),
    ("import no_such_package\nlayer = 1 / 0", 1, "ZeroDivisionError"),
    ("x = 3", 1, "no layer"),
])
def test_the_command(tmp_path, text, code, words):
    (tmp_path / "myport.py").write_text(text)
    result = subprocess.run([sys.executable, "-m", "lab.port", str(tmp_path / "myport.py")],
                            cwd=Path(port.__file__).parents[1], capture_output=True, text=True)
    output = result.stdout + result.stderr
    assert result.returncode == code and words in output and "Traceback" not in output
