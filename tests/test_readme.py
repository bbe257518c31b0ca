"""The README is current: it quotes the code verbatim, its flags exist, and its commands run."""
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.diff_v2 import matched_width
from model import ATTENTION, MLP, GPTConfig

HERE = Path(__file__).parent.parent
README = (HERE / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PROGRAMS = r"train|sample|bench|prepare_fineweb|experiments\.\w+"


def without_indentation(text):
    return "\n".join(line.strip() for line in text.strip().split("\n"))


def test_its_quotes_are_verbatim():
    code = without_indentation((HERE / "model.py").read_text())
    # a block that imports is a program of the reader's, and not from model.py
    quotes = [block for block in BLOCKS if "import" not in block]
    assert len(quotes) >= 6
    for quote in quotes:
        assert without_indentation(quote) in code, quote
        assert quote.count("\n") <= 12


@pytest.mark.parametrize("start, heads", [("layer = Diff(", 6), ("layer = DiffV2(", 12)])
def test_its_layers_run(start, heads):
    (block,) = [block for block in BLOCKS if start in block]
    names = {}
    exec(block, names)
    assert names["y"].shape == (2, 100, 768)
    assert names["layer"].n_value_head == heads


def test_its_width_gives_diff_v2_the_parameters_of_softmax():
    width = 1788
    assert f"{width:,}, where softmax has 2,048" in README
    assert width == matched_width(768, 12)
    assert MLP(GPTConfig(n_embd=768)).down_proj.in_features == 2048


def test_its_fifth_arm_trains():
    fifth_arm = BLOCKS[-1]
    # fewer steps, since a test should take seconds
    short = fifth_arm.replace('"--steps=20"', '"--steps=2", "--eval_tokens=256"')
    assert short != fifth_arm
    exec(short, {})
    assert ATTENTION.pop("qknorm").__name__ == "QKNorm"
    assert Path("out/qknorm/ckpt.pt").exists()


def test_its_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        if not link.startswith("http"):
            assert (HERE / link).exists(), link
    for page in HERE.glob("assets/results/**/*.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page}: {link}"


def test_all_figures_are_shown_on_a_page():
    pages = [HERE / "README.md", *HERE.glob("assets/results/**/*.md")]
    shown = set()
    for page in pages:
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text()):
            shown.add((page.parent / link).resolve())
    # a figure on no page is a figure that nobody keeps up to date
    figures = {path.resolve() for path in HERE.glob("assets/**/*.png")}
    assert figures <= shown


def test_its_tests_exist():
    sources = (HERE / "test_model.py").read_text()
    for name in re.findall(r"`(test_\w+)`", README):
        assert f"def {name}(" in sources, name


@pytest.mark.parametrize(
    "program, flags",
    re.findall(rf"^    .*?\b({PROGRAMS})(?:\.py)?\b([^#&\n]*)", README, re.MULTILINE),
)
def test_its_flags_exist(program, flags, capsys):
    words = flags.split()
    # --help of a verb lists more than that of the program
    has_verbs = program in ("bench", "experiments.crowd", "experiments.checkpoints")
    verb = [word for word in words if not word.startswith("-")][:1] if has_verbs else []
    with pytest.raises(SystemExit):
        importlib.import_module(program).main([*verb, "--help"])
    if program in ("experiments.toy", "experiments.ablations"):
        with pytest.raises(SystemExit):
            importlib.import_module("train").main(["--help"])  # which takes their other flags
    known = re.findall(r"--\w+", capsys.readouterr().out)
    assert set(re.findall(r"--\w+", flags)) <= set(known)


@pytest.mark.slow
def test_its_commands_run_at_toy_size():
    """One after the other, in a copy of the repository. Not those that need a network or a GPU."""
    ignored = shutil.ignore_patterns(".git", "out", "data")
    shutil.copytree(HERE, "copy", ignore=ignored)
    # --restart, because several commands would train into the same folder
    few_steps = ["--steps=2", "--eval_tokens=256", "--restart"]
    shorter = {"train.py": few_steps, "sample.py": ["--max_new_tokens=9"], "bench.py": []}
    for program, flags in shorter.items():
        pattern = rf"^    ((?:python|torchrun) [^#\n]*\b{program}[^#\n]*)"
        commands = re.findall(pattern, README, re.MULTILINE)
        assert commands
        for command in commands:
            if "gpt2" not in command and "novel" not in command:
                words = shlex.split(command)
                if words[0] == "python":
                    words[0] = sys.executable
                subprocess.run([*words, *flags], cwd="copy", check=True)
