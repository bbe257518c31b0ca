"""The README is current: its quotes are verbatim, its code runs, its links lead somewhere. And the
ground floor does without the lab."""
import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from helpers import TOP
from model import GPT, GPTConfig, Softmax

README = (TOP / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
TINY = "--n_layer=1 --n_embd=32 --n_head=2 --block_size=32 --total_batch=128 --eval_tokens=256"
ENVIRONMENT = {"PYTHONPATH": str(TOP), "PATH": "", "OMP_NUM_THREADS": "1"}


def block_with(words):
    (block,) = [block for block in BLOCKS if words in block]
    return block


def without_indent(code):
    return "\n".join(line.strip() for line in code.splitlines())


def test_its_quotes_are_verbatim():
    code = without_indent((TOP / "model.py").read_text())
    ours = ("import", "count = ")  # these blocks are no quotes, but code of their own
    quotes = [block for block in BLOCKS if not any(word in block for word in ours)]
    assert len(quotes) == 3
    for quote in quotes:
        assert without_indent(quote) in code, quote


def test_its_rows_of_numbers_are_right():
    A_1 = F.softmax(torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0]), dim=-1)
    A_2 = F.softmax(torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]), dim=-1)
    right = [A_1, A_2, A_1 - 0.6 * A_2, A_1 - 0.7 / 5]
    rows = re.findall(r"^    \S.*?  ((?: *-?\d\.\d{3}){5})$", README, re.MULTILINE)
    assert [row.split() for row in rows] == [[f"{a:.3f}" for a in row] for row in right]


def test_its_layer_runs():
    names = {}
    exec(block_with("diff = Diff("), names)
    assert names["y"].shape == (2, 100, 768)
    assert (names["diff"].subln.weight == 0.2).all()
    assert names["diff_v2"].mlp_width == 1788 < names["diff"].mlp_width


def test_its_model_writes_text(capsys):
    folder = Path("out/toy/diff")
    folder.mkdir(parents=True)
    model = GPT(GPTConfig(attn="diff", n_layer=1, n_head=2, n_embd=32, vocab_size=257))
    model.save(folder / "ckpt.pt", tokenizer="bytes")
    exec(block_with("GPT.load("), {})
    assert capsys.readouterr().out.strip()


def test_its_average_is_that_of_model_py():
    layer = Softmax(GPTConfig(n_embd=16, n_head=2), depth=0)
    v = layer.project(torch.randn(2, 10, 16))[2]
    y = torch.randn(2, 2, 10, 8)
    names = dict(torch=torch, T=10, v=v, y=y, lam=torch.tensor(0.7))
    exec(block_with("count = "), names)
    U = torch.ones(10, 10).tril() / torch.arange(1, 11)[:, None]
    torch.testing.assert_close(names["y"], y - 0.7 * U @ v)


def test_its_arm_trains_and_samples():
    Path("myarm.py").write_text(block_with("class QKNorm"))
    commands = re.findall(r"^    (python myarm.py .*)$", README, re.MULTILINE)
    assert len(commands) == 2
    for command, more in zip(commands, [TINY, "--max_new_tokens=5"]):
        words = shlex.split(command)[1:] + more.split() + ["--device=cpu"]
        subprocess.run([sys.executable, *words], env=ENVIRONMENT, check=True)
    assert Path("out/toy/qknorm/ckpt.pt").exists()


def test_its_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", README):
        if not link.startswith("http"):
            assert (TOP / link).exists(), link
    headings = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors


def test_its_tests_exist():
    source = (TOP / "test_model.py").read_text()
    for name in re.findall(r"`(test_\w+|by_the_papers_equations)`", README):
        assert f"def {name}(" in source or (TOP / f"{name}.py").exists(), name


def imports_of(program):
    """The modules that a program imports anywhere in its code."""
    for node in ast.walk(ast.parse((TOP / f"{program}.py").read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


def test_the_ground_floor_does_not_know_the_lab():
    """model.py needs nothing but torch, and no file above it has to be there for those below."""
    order = ["model", "common", "data", "train", "sample", "prepare_fineweb", "bench"]
    for program in order:
        found = set(imports_of(program))
        assert "lab" not in found
        ours = found & set(order)
        if program in ("model", "common"):
            assert not ours
        assert ours <= {"model", "common", "data"} | ({"train"} if program == "bench" else set())
    optional = "flash_attn"
    assert set(imports_of("model")) <= {"torch", optional, *sys.stdlib_module_names}


def test_what_an_import_loads():
    """PyTorch's compiler takes a second, and datasets would load torch for nothing."""
    for program, absent in [("train", "torch._dynamo"), ("prepare_fineweb", "torch")]:
        code = f"import sys, {program}; sys.exit({absent!r} in sys.modules)"
        subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True)
