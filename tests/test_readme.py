"""The README is current: its code, its commands, its links and its numbers."""
import importlib
import inspect
import re
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

import model
import train
from helpers import TOP, TOY

README = (TOP / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_a_block_of_python_runs(block):
    usual = set(model.ATTENTION)
    with patch.dict(model.ATTENTION):
        exec(block, {"__name__": "readme"})
        for attn in model.ATTENTION.keys() - usual:  # an arm of one's own
            train.main([*TOY, f"--attn={attn}", "--steps=2"])


def test_its_commands_have_the_flags_that_they_use():
    for module, flags in re.findall(r"\b(?:python|run) (?:-m )?([\w./]+)([^\n#`]*)", README):
        if not module.endswith(".py") and not module.startswith("lab."):
            continue  # another project's, like venv or pytest
        name = module.removesuffix(".py").replace(".", "/")
        if not name.startswith("my"):  # a file of the reader's own
            assert (TOP / f"{name}.py").exists(), module
        if name in ("train", "sample", "bench", "prepare_fineweb"):
            names = importlib.import_module(name).Config.__dataclass_fields__.keys()
            assert set(re.findall(r"--(?:no-)?(\w+)", flags)) <= names, flags


def test_its_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", README):
        assert link.startswith("http") or (TOP / link).exists(), link


def test_its_rows_of_numbers_are_right():
    A_1 = F.softmax(torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0]), dim=-1)
    A_2 = F.softmax(torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]), dim=-1)
    said = " ".join(README.replace("|", " ").split())
    rows = {"A₁": A_1, "A₂": A_2}
    rows |= {"A₁ − 0.6 A₂": A_1 - 0.6 * A_2, "A₁ − 0.6 U": A_1 - 0.6 / 5}
    for name, row in rows.items():  # the right token's weight, and the others' together
        assert f"{name} {row[1]:.3f} {row.sum() - row[1]:.3f}" in said


def test_its_files_are_about_as_long_as_it_says():
    sizes = re.findall(r"^(\S+\.py) +(\d+) lines", README, re.MULTILINE)
    assert [name for name, _ in sizes] == ["model.py", "train.py"]
    for name, lines in sizes:
        found = len((TOP / name).read_text(encoding="utf-8").splitlines())
        assert int(lines) == pytest.approx(found, abs=10), name


def test_its_difference_is_the_one_in_the_class_diff():
    new = [line for line in README.splitlines() if line.startswith("+ ")]
    lines = [line[1:].split("#")[0].strip() for line in new]
    source = [line.strip() for line in inspect.getsource(model.Diff.make_map).splitlines()]
    assert lines and set(lines) <= set(source)
