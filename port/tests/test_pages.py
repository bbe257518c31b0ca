"""The pages are what the data say, and their links lead somewhere."""
import re
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from port import __main__, diagnose, pages, survey, vectors
from port.mistakes import MISTAKES
from port.tests import wrong_layers

ROOM = Path(__file__).parents[1]


def text_of(name):
    return (ROOM / name).read_text(encoding="utf-8")


def test_the_page_of_mistakes_is_written_from_the_list():
    assert text_of("mistakes.md") == pages.mistakes_page()  # else run python -m port.pages


def test_headings_on_the_page_of_mistakes_differ_and_say_version_2():
    headings = re.findall("^### (.*)", pages.mistakes_page(), re.MULTILINE)
    assert len(set(headings)) == len(headings)
    assert [name for name in headings if "2" in name] == ["lam, in version 2", "norm, in version 2"]


def test_the_page_of_mistakes_explains_the_names_in_its_code():
    for name in ("x", "y", "m", "n", "times", "w", "step"):
        assert re.search(rf"\b{name} (is|holds|what)\b", pages.HEAD), name
    assert "A mistake that leaks is listed as DIFFERS" in pages.HEAD


def test_the_page_of_ports_and_the_readme_have_the_numbers_of_the_survey():
    page = text_of("ports.md")
    assert page == survey.fill(page)  # else run python -m port.pages
    n = survey.counts(survey.layers_of(*survey.COUNTED))
    assert f"Of the {n['layers']} that are counted above, {n['explained']} are explained" in page
    assert survey.how_often_right() in " ".join(text_of("README.md").split())
    unknown = [s["layers"] for s in survey.SURVEY["samples"] if not survey.layers_of(s["sample"])]
    assert f"Of the {sum(unknown)} layers with question marks" in page and n["NaN"] == 1
    readme = " ".join((ROOM.parent / "README.md").read_text(encoding="utf-8").split())
    assert survey.in_one_sentence() in readme.replace("[", "").replace("](port/ports.md)", "")


def test_the_survey_is_whole():
    names = {mistake.name for mistake in MISTAKES}
    for layer in survey.SURVEY["layers"]:
        assert set(layer["causes"]) <= names, layer
        assert layer["verdict"] in ("SAME", "CHOICE", "DIFFERS", "BROKEN", None)
        assert layer["known"] and (layer["repository"] or layer["file"])
        assert layer["verdict"] == "BROKEN" or not layer["sees_future"]
    for sample in survey.SURVEY["samples"]:
        assert len(survey.layers_of(sample["sample"])) in (0, sample["layers"])


@pytest.mark.parametrize("program, argument, code", [
    (pages, "--help", 0), (pages, "--hlep", 2), (vectors, "--help", 0), (vectors, "--hlep", 2),
])
def test_what_writes_a_file_writes_nothing_for_help_or_a_slip(program, argument, code, monkeypatch):
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: pytest.fail("it writes a page"))
    monkeypatch.setattr(np, "savez_compressed", lambda *_, **__: pytest.fail("it writes vectors"))
    with pytest.raises(SystemExit) as end:
        program.main([argument])
    assert end.value.code == code


def test_the_readme_counts_the_mistakes_that_three_ports_or_more_have():
    layers = survey.layers_of(*survey.COUNTED)
    counted = Counter(cause for layer in layers for cause in set(layer["causes"]))
    page = text_of("README.md")
    said = {name: int(n) for name, n in re.findall(r"^- `([^`]+)` (\d+)", page, re.MULTILINE)}
    assert said == {name: n for name, n in counted.items() if n > 2}
    assert list(said.values()) == sorted(said.values(), reverse=True)
    assert f"the {len(layers)} [ports" in page


def test_the_readme_shows_its_example_and_what_is_printed_for_it():
    page = text_of("README.md")
    for line in re.search("```python\n(.*?)```", page, re.DOTALL)[1].splitlines():
        assert line in __main__.__doc__
    verdict = diagnose(wrong_layers.NoFactor(), n_head=8, depth=3)
    printed = "\n".join(verdict.lines)
    shown = textwrap.dedent(page[page.index("    DIFFERS"):].split("\n\n")[0])
    assert re.sub(r"to \de-\d\d", "", shown) == re.sub(r"to \de-\d\d", "", printed)


def test_the_page_for_an_agent_is_short():
    assert len(text_of("README.md").split()) <= 700


@pytest.mark.parametrize("name", ["README.md", "mistakes.md", "ports.md", "vectors.md"])
def test_links_lead_somewhere(name):
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(name)):
        assert link.startswith("http") or (ROOM / link).exists(), link
