"""`python -m port myport.py`: what it prints, and its exit code."""
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from port import stand_ins
from port.__main__ import main
from port.tests import right_layers as right

HERE = "from port.tests import right_layers as right, wrong_layers as wrong\n"
RIGHT = HERE + "layer, n_head, depth = right.Right(), 8, 3\n"


def run(text, *lines, name="myport.py"):
    Path(name).write_text(text)
    return main([name, *lines])


@pytest.mark.parametrize("text, code, words", [
    (RIGHT, 0, "SAME"),
    (HERE + "layer, n_head, depth = wrong.ConstantInit(), 8, 3", 0, "CHOICE   lambda_init"),
    (HERE + "layer, n_head, depth = wrong.NoFactor(), 8, 3", 1, "DIFFERS  factor"),
    (HERE + "layer, n_head, depth = wrong.OffByOne(), 8, 3", 1, "BROKEN   sees the future"),
])
def test_a_verdict_has_its_exit_code(text, code, words, capsys):
    assert run(text) == code
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("text, words", [
    ("x = 3", "there is no layer: add layer = "),
    ("layer = 1 / 0", "ZeroDivisionError: division by zero (myport.py, line 1: layer = 1 / 0)"),
    ("def f(:", "SyntaxError"),
    (RIGHT + "import sys; sys.exit(0)", "myport.py ends the program (sys.exit)"),
    ("import argparse\nargparse.ArgumentParser().parse_args(['--no'])", "ends the program"),
    ("import jax.numpy as jnp\nlayer = None", "imports jax. port runs PyTorch layers only"),
    ("import mlx.core as mx\nlayer = None", "port/vectors.md"),
    (HERE + "layer = wrong.NumpyLayer()", "port/vectors.md"),
    (HERE + "layer, n_head = right.Right(), 4", "is version = 1, n_head = 8 meant"),
    ("import torch\nclass L(torch.nn.Module):\n"
     "    def __init__(self): super().__init__(); self.q = torch.nn.Linear(64, 64)\n"
     "    def forward(self, x):\n        assert x is None\n"
     "layer = L()", "AssertionError (myport.py, line 5: assert x is None)"),
])
def test_without_a_verdict_it_is_two_and_one_sentence(text, words, capsys):
    assert run(text) == 2
    output = capsys.readouterr()
    assert output.out == "" and words in output.err and "Traceback" not in output.err


@pytest.mark.parametrize("text, name", [
    (RIGHT, "attn_v0.1.py"),
    ("from . import other\n" + RIGHT, "v0.1/attn.py"),  # its folder is a package then
])
def test_a_name_with_a_dot_is_no_module(text, name, capsys):
    Path("v0.1").mkdir()
    Path("v0.1/other.py").touch()
    assert run(text, name=name) == 2
    assert "rename it, without a dot in its name" in capsys.readouterr().err


def test_a_missing_file_and_no_file(capsys):
    assert main(["missing.py"]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "The exit code is 0 for SAME and CHOICE" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["myport.py", "--help"],
                                   ["myport.py", "n_head=8", "-h"], ["--help", "--depth=2"]])
def test_help_may_stand_anywhere(words, capsys):
    assert main(words) == 0
    output = capsys.readouterr()
    assert output.out.startswith("What is wrong with my port") and output.err == ""


@pytest.mark.parametrize("words, flag", [
    (["--depth=2"], "--depth=2"), (["--depth", "2"], "--depth"), (["n_head=8", "-v"], "-v"),
])
def test_a_flag_is_refused_with_a_sentence(words, flag, capsys):
    assert run(RIGHT, *words) == 2
    assert main([*words, "myport.py"]) == 2  # before the file, too
    output = capsys.readouterr()
    sentence = f"no verdict: {flag}: port takes no flags. Write depth=3, as in Python\n"
    assert output.out == "" and output.err == 2 * sentence


def test_a_depth_that_is_not_said_is_asked_for(capsys):
    assert run(HERE + "layer, n_head = right.Right(), 8") == 2
    output = capsys.readouterr()
    assert output.out == "" and "no verdict: is depth = 3 meant?" in output.err


def python(code):
    top = Path(__file__).parents[2]
    return subprocess.run([sys.executable, "-c", code], cwd=top, capture_output=True, text=True)


@pytest.mark.parametrize("argument, code, words", [
    ("--help", 0, "The exit code is 0 for SAME and CHOICE"),
    ("myport.py", 2, "PyTorch can't be imported here"),
    ("myport.py", 2, "For JAX, MLX, numpy, C++ and others there are numbers to compare with"),
])
def test_without_torch_it_helps_too(argument, code, words):
    result = python("import sys; sys.modules['torch'] = None; from port.__main__ import main; "
                    f"sys.exit(main(['{argument}']))")
    assert result.returncode == code
    assert words in result.stdout + result.stderr and "Traceback" not in result.stderr


def test_the_sentences_on_failures_do_not_import_torch():
    result = python("import sys; sys.modules['torch'] = None; import port.problems")
    assert result.returncode == 0, result.stderr


def test_port_alone_does_not_import_torch():
    result = python("import sys, port; assert 'torch' not in sys.modules; "
                    "from port import diagnose, Verdict; assert 'torch' in sys.modules")
    assert result.returncode == 0, result.stderr


def test_its_own_prints_are_swallowed(capsys):
    text = HERE + "print('hello')\nlayer, n_head, depth = right.Talkative(), 8, 3"
    assert run(text) == 0
    output = capsys.readouterr().out
    assert output.startswith("SAME") and "hello" not in output and "shapes" not in output


def test_lines_behind_the_file_change_its_flags():
    text = HERE + ("RIGHT = False\nclass L(right.Right):\n    def mask(self, s):\n"
                   "        return super().mask(s) if RIGHT else s\n"
                   "layer, n_head, depth = L(), 8, 3")
    assert run(text) == 1
    assert run(text, "RIGHT=True", name="again.py") == 0


def test_a_misspelt_word_behind_the_file_is_not_ignored(capsys):
    assert run(RIGHT, "n_heads=4") == 2
    error = capsys.readouterr().err
    assert "n_heads is assigned and never used. You may say layer, n_head" in error
    helper = ["kv=4", "layer=right.Right(kv)", "n_head=8", "depth=3"]
    assert run(HERE, *helper, name="again.py") == 0


def test_stand_ins_and_relative_imports(capsys):
    """What needs a GPU has a stand-in, and a file may import its neighbours with a dot."""
    Path("code-of-mine").mkdir()
    Path("code-of-mine/parts.py").write_text(HERE + "from flash_attn import flash_attn_func\n")
    text = ("import torch\nfrom apex.normalization import FusedRMSNorm\nfrom .parts import *\n"
            "class L(right.Right):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.subln = FusedRMSNorm(16, eps=1e-5, elementwise_affine=True)\n"
            "    def forward(self, x):\n"
            "        q, k, v = self.split(x.cuda())\n"
            "        q, k, v = [m.transpose(1, 2) for m in (self.turn(q), self.turn(k), v)]\n"
            "        y = [flash_attn_func(q[:, :, i::2], k[:, :, i::2], v, causal=True)\n"
            "             for i in (0, 1)]\n"
            "        return self.finish((y[0] - self.lam() * y[1]).transpose(1, 2))\n"
            "layer, n_head, depth = L(), 8, 3")
    assert run(text, name="code-of-mine/attention.py") == 0
    output = capsys.readouterr()
    assert "apex can't be imported here, a stand-in is in its place" in output.err
    assert "causal=True, a stand-in for flash_attn, a stand-in for apex" in output.out


@pytest.mark.parametrize("flag, rotate", [
    ({}, right.rotate_halves), (dict(interleaved=False), right.rotate_halves),
    (dict(interleaved=True), right.rotate_neighbours),
])
def test_the_stand_in_for_flash_attns_rotary_turns_as_it_does(flag, rotate):
    x = torch.randn(2, 5, 3, 8)
    cos, sin = right.tables(5, 8)
    expected = rotate(x, cos[:, None], sin[:, None])
    torch.testing.assert_close(stand_ins.apply_rotary_emb(x, cos, sin, **flag), expected)
    cos, sin = right.tables(5, 4)  # of 8 channels the first 4 turn
    expected = torch.cat((rotate(x[..., :4], cos[:, None], sin[:, None]), x[..., 4:]), dim=-1)
    torch.testing.assert_close(stand_ins.apply_rotary_emb(x, cos, sin, **flag), expected)


@pytest.mark.parametrize("flag, code, words", [
    ("interleaved=True", 0, "SAME\n"), ("", 0, "SAME     rotary by halves"),
])
def test_a_port_that_calls_flash_attns_rotary_is_read_by_its_flag(flag, code, words, capsys):
    text = ("import torch\nfrom flash_attn.layers.rotary import apply_rotary_emb\n"
            "class L(right.Right):\n"
            "    def turn(self, x):\n"
            "        cos, sin = right.tables(x.shape[2], 8)\n"
            f"        x = apply_rotary_emb(x.transpose(1, 2), cos, sin, {flag})\n"
            "        return x.transpose(1, 2)\n"
            "layer, n_head, depth = L(), 8, 3")
    assert run(HERE + text) == code
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("line, words", [
    ("n = torch.arange(no_such_package.size())",
     "no verdict: install no_such_package: its stand-in was called. TypeError: arange()"),
    ("from no_such_package.layers import f; a, b = f(3)",
     "ValueError: not enough values to unpack (expected 2, got 0) (myport.py, line 4: "
     "from no_such_package.layers import f; a, b = f(3)) (a stand-in was used for no_such"),
    ("from flash_attn import varlen; n = torch.arange(varlen(3))",
     "no verdict: do without flash_attn, which needs a GPU: its stand-in was called"),
    ("f = no_such_package.f; L.forward = lambda self, x: f(x); layer = L()",
     "install no_such_package: its stand-in was called. the layer does not run: TypeError: it "
     "gives a unittest.mock.MagicMock, and no tensor"),
])
def test_what_a_stand_in_has_to_do_with_a_failure_is_said(line, words, capsys):
    text = HERE + "import torch, no_such_package\nclass L(right.Right): pass\n"
    assert run(text + line) == 2
    assert words in capsys.readouterr().err


def test_it_leaves_no_trace_in_the_process_that_calls_it():
    before = (torch.Tensor.cuda, torch.nn.Module.cuda, list(sys.path), list(sys.argv),
              dict(sys.modules), dict(os.environ), sys.dont_write_bytecode, list(warnings.filters))
    run("import no_such_package\n" + RIGHT)
    after = (torch.Tensor.cuda, torch.nn.Module.cuda, list(sys.path), list(sys.argv),
             dict(sys.modules), dict(os.environ), sys.dont_write_bytecode, list(warnings.filters))
    assert before == after


def test_it_says_after_five_seconds_that_it_is_still_looking(capsys, monkeypatch):
    now = iter(range(0, 10**9, 3))
    monkeypatch.setattr("port.search.time.monotonic", lambda: next(now))
    assert run(RIGHT) == 0
    output = capsys.readouterr()
    assert output.err.count("still looking") == 1 and output.out.startswith("SAME")


def test_as_a_program():
    Path("myport.py").write_text(RIGHT)
    top = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-m", "port", Path("myport.py").resolve()], cwd=top,
                            capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.startswith("SAME\nread with n_head=8")
