"""The README is current: it quotes the code verbatim, its commands exist, its links lead somewhere."""
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model import MLP, GPTConfig, Softmax, matched_width

HERE = Path(__file__).parent.parent
README = (HERE / "README.md").read_text()
PAGES = [HERE / "README.md", *HERE.glob("assets/results/**/*.md")]
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"(?:^    |`)((?:python|torchrun) [^`#\n]*)", README, re.MULTILINE)


def test_its_quotes_are_verbatim():
    code = (HERE / "model.py").read_text()
    ours = ("import", "count = ")  # these blocks are no quotes, but code of their own
    quotes = [block for block in BLOCKS if not any(word in block for word in ours)]
    assert len(quotes) >= 3
    for quote in quotes:
        assert quote in code, quote


def test_its_numbers_are_those_of_model_py():
    """The rows of the tutorial are what `python model.py` prints."""
    command = [sys.executable, HERE / "model.py"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^    \S.*?  ((?: *-?\d\.\d\d){5})$", README, re.MULTILINE)
    assert len(rows) == 4
    for row in rows:
        numbers = row.split()
        assert re.search(r"\s+".join(map(re.escape, numbers)), printed), row


def test_its_layer_runs():
    (block,) = [block for block in BLOCKS if "diff = Diff(" in block]
    names = {}
    exec(block, names)
    assert names["y"].shape == (2, 100, 768)
    assert (names["diff"].subln.weight == 0.2).all()
    width = MLP(GPTConfig(attn="diff_v2", n_embd=768, n_head=12)).down_proj.in_features
    assert width == matched_width(768, 12) < 2048


def test_its_average_is_that_of_model_py():
    (block,) = [block for block in BLOCKS if "count = " in block]
    layer = Softmax(GPTConfig(n_embd=16, n_head=2, minus_average=True, rope_theta=0), depth=0)
    x = torch.randn(2, 10, 16)
    v = layer.project(x)[2]
    y = torch.randn(2, 2, 10, 8)
    lam = torch.tensor(0.7)
    names = dict(torch=torch, T=10, v=v, y=y, lam=lam)
    exec(block, names)
    torch.testing.assert_close(names["y"], y - lam * layer.average(v, layer.rope_from_0(x)))


def test_its_arm_trains_and_samples():
    (block,) = [block for block in BLOCKS if "class QKNorm" in block]
    Path("myarm.py").write_text(block)
    commands = [command for command in COMMANDS if "myarm.py" in command]
    assert len(commands) == 2
    environment = {"PYTHONPATH": str(HERE), "PATH": "", "OMP_NUM_THREADS": "1"}
    said = ""
    for command, more in zip(commands, ["--n_layer=1 --eval_tokens=256", "--max_new_tokens=5"]):
        words = shlex.split(command)[1:] + more.split() + ["--device=cpu"]
        said += subprocess.check_output([sys.executable, *words], env=environment, text=True)
    # and so does the command that training prints
    (printed,) = [line for line in said.splitlines() if line.startswith("sample from it:")]
    words = shlex.split(printed.removeprefix("sample from it:"))[1:]
    subprocess.run([sys.executable, *words], check=True, env=environment, capture_output=True)
    assert Path("out/qknorm-n_layer1/ckpt.pt").exists()


def test_its_links_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page}: {link}"
    headings = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors


def test_all_figures_are_shown_on_a_page():
    shown = set()
    for page in PAGES:
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text()):
            shown.add((page.parent / link).resolve())
    # a figure on no page is a figure that nobody keeps up to date
    assert {path.resolve() for path in HERE.glob("assets/**/*.png")} <= shown


def test_its_tests_exist():
    source = (HERE / "test_model.py").read_text()
    for name in re.findall(r"`(test_\w+)`", README):
        assert f"def {name}(" in source, name


def help_of(program, verb, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(program).main([*verb, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_its_flags_exist(command, capsys):
    words = shlex.split(command.split(" and ")[0])
    folders = ("experiments.", "integrations.")
    programs = [word for word in words if word.endswith(".py") or word.startswith(folders)]
    program = programs[0].removesuffix(".py")
    if program in ("myarm", "model"):
        return
    if program.startswith("integrations."):
        pytest.importorskip("lm_eval", reason="needs requirements-extra.txt")
    rest = words[words.index(programs[0]) + 1 :]
    verb = rest[:1] if rest and not rest[0].startswith("-") else []
    known = set(re.findall(r"--[\w-]+", help_of(program, verb, capsys)))
    flags = {word.split("=")[0] for word in rest if word.startswith("--")}
    assert flags <= known


def test_every_program_stands_on_a_page():
    """What neither README nor a page names has not earned its place."""
    pages = "\n".join(page.read_text() for page in PAGES)
    for path in HERE.glob("*.py"):
        if path.name != "conftest.py":
            assert path.name in pages, path
    for folder in ("experiments", "integrations"):
        for path in HERE.glob(f"{folder}/*.py"):
            if path.stem not in ("__init__", "sweep"):  # sweep is a part of the others
                assert f"python -m {folder}.{path.stem}" in pages, path


def programs():
    """Each program of ours with the verbs that it has."""
    for program in ("train", "sample", "prepare_fineweb"):
        yield program, ""
    for verb in ("loss", "speed", "decode"):
        yield "bench", verb
    for verb in ("toy", "average", "controls", "table6", "gpt2"):
        yield "experiments.text", verb
    for verb in ("softmax", "linear", "publish"):
        yield "experiments.lookup", verb
    for verb in ("maps", "outliers"):
        yield "experiments.checkpoints", verb
    yield "integrations.lm_eval", ""


@pytest.mark.parametrize("program,verb", list(programs()))
def test_every_flag_and_verb_stands_on_a_page(program, verb, capsys):
    if program.startswith("integrations."):
        pytest.importorskip("lm_eval", reason="needs requirements-extra.txt")
    pages = "\n".join(page.read_text() for page in PAGES)
    command = program + ".py" if "." not in program else "-m " + program
    if verb:
        assert f"python {command} {verb}" in pages
    flags = set(re.findall(r"^  (--[\w-]+)", help_of(program, [verb] if verb else [], capsys), re.M))
    known = set(re.findall(r"(--[\w-]+)", pages))
    known |= {flag.replace("--no-", "--", 1) for flag in known}
    assert flags - {"--help"} <= known
